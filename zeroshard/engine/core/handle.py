"""The handle: all objects that belong to one sharded model (runtime, communicators, hooks), found from the model.

It is an attribute of the model, so that several models can be sharded in one process and nothing is global.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.arguments import need_kind
from zeroshard.checkpoint.saver import Saver
from zeroshard.comm.collectives import Collectives
from zeroshard.comm.mesh import RankMesh
from zeroshard.comm.oplog import OperationLog
from zeroshard.comm.stages import Stages
from zeroshard.comm.watchdog import Watchdog
from zeroshard.engine.core.runtime import Runtime
from zeroshard.engine.core.statistics import Statistics
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.unit import Unit
from zeroshard.errors import DivergenceError, UsageError, ZeroShardError
from zeroshard.mesh import Axes
from zeroshard.plan.plan import Plan

_ATTRIBUTE = "_zeroshard_handle"
_CLOSED = "_zeroshard_closed"
_LOGGER = logging.getLogger("zeroshard")


@dataclass
class Comm:
    """The communicators, the logs of what was issued on them, and the watchdog.

    `log` has the operations in the order of the lists, equal on all ranks; `sent` counts what the process groups were
    given, when they were given it.
    """

    mesh: RankMesh
    log: OperationLog
    sent: OperationLog
    watchdog: Watchdog
    control: Collectives
    gathers: dict[Axes, Collectives]
    reduces: dict[Axes, Collectives]
    stages: Stages | None = None
    """The other pipeline stages; None without pipeline parallelism."""

    @property
    def rank(self) -> int:
        """This rank's number among all ranks, those of other stages too."""
        return self.mesh.rank if self.stages is None else self.stages.place.rank

    @property
    def ranks(self) -> int:
        """All ranks, those of other stages too."""
        return self.mesh.world_size if self.stages is None else self.stages.place.whole.world_size

    def made(self) -> list[dist.ProcessGroup]:
        """The communicators that were made for the model."""
        return [*self.mesh.made(), *(() if self.stages is None else self.stages.made())]

    def close(self, *, idle: bool) -> None:
        """Stop the watchdogs and, if `idle`, destroy the communicators: no operation may be running on them."""
        self.watchdog.close()
        if self.stages is not None:
            self.stages.close(idle=idle)
        if idle:
            self.mesh.destroy()

    def explain_mismatch(self) -> NoReturn:
        """Called on all ranks when digests differ on some stage. Raises DivergenceError."""
        if self.stages is None or self.mesh.world_size > 1:
            self.watchdog.explain_mismatch()
        raise DivergenceError(
            "ranks of another pipeline stage issued different collectives in the last step; their own message says "
            "which"
        )


@dataclass
class Handle:
    """A sharded model's runtime and communicators.

    Attributes:
        last: statistics of the last step, None before the first.
        saver: what saves its checkpoints, None before the first save or load.
        closers: called before the communicators are destroyed, to stop using them.
        closed: whether `close` was called.
    """

    runtime: Runtime
    comm: Comm
    device: torch.device
    hooks: list[RemovableHandle]
    last: Statistics | None = None
    saver: Saver | None = None
    closers: list[Callable[[], object]] = field(default_factory=list)
    closed: bool = False

    @property
    def plan(self) -> Plan:
        return self.runtime.plan

    @property
    def place_of(self) -> dict[int, tuple[Unit, Group, int]]:
        """Where each parameter lives: id(parameter) -> (unit, group, index in the group)."""
        return {
            id(parameter): (unit, group, index)
            for unit in self.runtime.units
            for group in unit.groups
            for index, parameter in enumerate(group.parameters)
        }

    def tied(self) -> list[tuple[str, nn.Parameter]]:
        """Every name of each parameter that has several, and the parameter."""
        of_name = {
            segment.name: parameter
            for unit in self.runtime.units
            for group in unit.groups
            for segment, parameter in zip(group.plan.layout.segments, group.parameters, strict=True)
        }
        aliases = self.plan.aliases
        names = dict.fromkeys((*aliases, *aliases.values()))
        return [(name, of_name[aliases.get(name, name)]) for name in names]

    def check_member(self, name: str, member: nn.Parameter) -> None:
        """Raises UsageError where the model has another parameter than `member` under a name by now."""
        try:
            found = self.runtime.model.get_parameter(name)
        except AttributeError:  # removed from the model, so there is nothing left to check
            return
        if found is not member:
            _refuse_replaced(name)

    def check_members(self) -> None:
        """Raises UsageError for parameters of the model that were added or replaced since it was sharded."""
        places = self.place_of
        for name, parameter in self.runtime.model.named_parameters():
            if id(parameter) not in places:
                _refuse_replaced(name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(
            "a sharded model can't be copied: its shards and communicators belong to it alone. Load "
            "zeroshard.full_state_dict(model) into a model that is not sharded"
        )

    def check_open(self) -> None:
        """Raises UsageError after `close`."""
        if self.closed:
            raise _closed(self.runtime.model)

    def close(self) -> None:
        """Take the hooks off the model, stop the watchdog, destroy the communicators; the parameters stay sharded."""
        if self.saver is not None:
            self.saver.close()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.closed = True
        self.runtime.model.__dict__.pop(_ATTRIBUTE, None)
        self.runtime.model.__dict__[_CLOSED] = True
        idle = self._finish_running()
        for closer in self.closers:
            closer()
        self.comm.close(idle=idle)

    def abandon(self, error: ZeroShardError) -> None:
        """Free everything without the other ranks, some of which are lost; the parameters are not usable afterwards."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.closed = True
        self.runtime.model.__dict__.pop(_ATTRIBUTE, None)
        self.runtime.model.__dict__[_CLOSED] = True
        if self.runtime.peers is not None:
            self.runtime.peers.close()
        self.comm.watchdog.interrupt(error)
        if self.comm.stages is not None:
            self.comm.stages.watchdog.interrupt(error)
        for closer in self.closers:
            closer()
        self.comm.close(idle=False)
        for memory in self.runtime.storage.tiers.values():
            memory.close()

    def _finish_running(self) -> bool:
        """Finish all running operations; False if that fails, since a communicator in use must not be destroyed."""
        if self.comm.watchdog.error is not None:
            return False
        try:
            self.runtime.drain()
        except ZeroShardError as error:
            _LOGGER.warning("close: the running operations could not be finished: %s", error)
            return False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return True


def attach(model: nn.Module, handle: Handle) -> None:
    """Remember the handle on the model. Raises UsageError when it is sharded already."""
    if _ATTRIBUTE in model.__dict__:
        raise UsageError("this model is sharded already; build a new one, or call zeroshard.close(model) first")
    model.__dict__[_ATTRIBUTE] = handle
    model.__dict__.pop(_CLOSED, None)
    dropped = weakref.finalize(model, handle.comm.watchdog.close)
    handle.closers.append(dropped.detach)  # else a model that outlives close() would keep its old communicators alive


def find_handle(model: nn.Module) -> Handle | None:
    """The model's handle; None if it is not sharded. Raises UsageError if `model` is not a module."""
    need_kind(model, nn.Module, "the model", "the module that zeroshard.shard() returned")
    found: Any = model.__dict__.get(_ATTRIBUTE)
    assert found is None or isinstance(found, Handle)
    return found


def handle_of(model: nn.Module) -> Handle:
    """The model's handle. Raises UsageError when the model is not sharded."""
    found = find_handle(model)
    if found is None and _CLOSED in model.__dict__:
        raise _closed(model)
    if found is None:
        raise UsageError(
            f"{type(model).__name__} is not sharded: pass the module that zeroshard.shard() returned, or engine.module"
        )
    return found


def _closed(model: nn.Module) -> UsageError:
    return UsageError(
        f"{type(model).__name__} was closed (zeroshard.close(), engine.destroy()) and is not sharded by a running "
        "engine any more: read, save and step before that, or shard it again to train on"
    )


def _refuse_replaced(name: str) -> NoReturn:
    raise UsageError(
        f"parameter {name!r} was added or replaced after the model was sharded: it is neither trained nor saved; build "
        "the model as it is to be before shard(), and change values inside "
        "zeroshard.GatheredParameters(parameters, modifier_rank=0)"
    )
