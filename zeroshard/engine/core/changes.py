"""Notices, in the first passes and steps and in some later ones, what was written past parameters' version counters.

    gathered       use        fingerprints of the unit's parameters
                   release    the same again: where they differ the change would be lost, and is refused
    resting whole  step       parameters that are not their master weights, rounded: master weights follow

`with torch.no_grad(): self.weight.clamp_()` counts up the parameter's version, which every step looks at (see
inspection). `self.weight.data.clamp_()` does not, nor does a write through a NumPy array or a kernel of one's own. So
the first passes record at the values, with gradients and without, and in the recomputation of their backward. Code that
does so in every pass is found there, code that begins later in the 100th, 1000th or 10000th; other passes issue no
kernel for it, unless `always` asks for it (`enable_sanity_checks` in a config). Parameters that rest whole without
master weights need no look: the step updates the values that it finds. On a GPU the host reads what was found two
passes later (see delayed_reads), or when everything is drained, so that no step waits for the device.
Rejected: a class of its own for parameters in use, whose `data` is watched. torch.compile treats every operation on
such a parameter as one that is overridden.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from zeroshard.engine.core.autograd import transforming
from zeroshard.engine.core.delayed_reads import DELAY, DelayedReads, on_host
from zeroshard.engine.core.inspection import refuse_written
from zeroshard.engine.memory.group import Group
from zeroshard.engine.memory.rank_values import is_split, read_values, update_master_weights
from zeroshard.engine.memory.unit import Unit
from zeroshard.engine.memory.update_view import update_param
from zeroshard.errors import ZeroShardWarning
from zeroshard.sharding.fingerprint import Fingerprints

FIRST_NUMBERS = 3
"""Passes of each kind, and steps, that are looked at."""
LATER_NUMBERS = frozenset({100, 1000, 10_000, 100_000, 1_000_000})
"""Numbers of passes and steps that are looked at once more, for what has begun meanwhile."""


def _looked_at(number: int, first: int = FIRST_NUMBERS) -> bool:
    return number <= first or number in LATER_NUMBERS


class ForwardChanges:
    """Compares what is gathered with what is released.

    Attributes:
        active: whether units that come into use are looked at.
        always: whether they are in every pass.
        expected: fingerprints of the units in use that were looked at, by unit and whether it is held.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = self.always = False
        self.expected: dict[tuple[int, bool], torch.Tensor] = {}
        self._fingerprints = Fingerprints(device)
        self._on_gpu = device.type == "cuda"
        self._passes = {True: 0, False: 0}
        self._reads: DelayedReads[Unit] = DelayedReads()

    def begin_pass(self) -> None:
        """A forward of the model begins. Raises UsageError for what an earlier pass was found to have written."""
        self.active = False
        if self._on_gpu:
            if torch.cuda.is_current_stream_capturing():
                return
            self._reads.next_pass()
            self.report(all_of_them=False)
        kind = torch.is_grad_enabled()
        self._passes[kind] += 1
        self.active = self.always or _looked_at(self._passes[kind])

    def record(self, unit: Unit, *, held: bool) -> None:
        """The unit's parameters have just got their values."""
        if transforming():  # vmap would take the operations of a fingerprint for its own
            return
        self.expected[unit.index, held] = self._fingerprints_of(unit, held)

    def compare(self, unit: Unit, *, held: bool) -> None:
        """The unit is about to be released. Raises UsageError where its parameters have been written on."""
        before = self.expected.pop((unit.index, held), None)
        if before is None:
            return
        different = self._fingerprints_of(unit, held) != before
        if not self.expected:
            self._fingerprints.give_memory_back()
        if self._on_gpu:
            self._reads.start(unit, different)
        else:
            _refuse(unit, different)

    def report(self, *, all_of_them: bool = True) -> None:
        """Raise UsageError for what was found so far; with `all_of_them` the host waits for the device."""
        for unit, different in self._reads.ready(all_of_them=all_of_them):
            _refuse(unit, different)

    def forget(self) -> None:
        """What was looked at is not compared: it was released unseen, or the shards were written."""
        if self.expected:
            self.expected.clear()
            self._fingerprints.give_memory_back()

    def _fingerprints_of(self, unit: Unit, held: bool) -> torch.Tensor:
        return self._fingerprints.of(value for group in unit.groups for value in group.values(held=held))


def _refuse(unit: Unit, different: torch.Tensor) -> None:
    found = different.tolist()
    if True in found:
        refuse_written(unit, found.index(True))


class WholeChanges:
    """Lets master weights follow what was written on parameters that rest whole, in the first steps; in all of them
    once there was something, or where `always` says so."""

    def __init__(self, units: Iterable[Unit], device: torch.device) -> None:
        self._groups = [group for unit in units for group in unit.trainable if _can_differ(group)]
        self._on_gpu = device.type == "cuda"
        self._steps = 0
        self._found = self.always = False
        self._reads: DelayedReads[None] = DelayedReads()

    def due(self) -> bool:
        """Whether the step that begins is looked at."""
        if not self._groups or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return False
        self._reads.next_pass()
        for _, differs in self._reads.ready():
            if bool(differs):
                self._note_change()
        self._steps += 1
        # What begins in one of the first steps is known some steps later, and must be followed meanwhile.
        return self._found or self.always or _looked_at(self._steps, FIRST_NUMBERS + (DELAY if self._on_gpu else 0))

    def _note_change(self) -> None:
        if not (self._found or self.always) and self._steps > FIRST_NUMBERS + DELAY:
            warnings.warn(
                f"step {self._steps} found parameters that were written on past their version counters "
                "(parameter.data.clamp_(...), say). Steps follow it from here on; where it began after step "
                f"{FIRST_NUMBERS}, the steps in between have undone it. Write under torch.no_grad() instead",
                ZeroShardWarning,
                stacklevel=2,
            )
        self._found = True

    def update_master_weights(self) -> None:
        """A step begins, and nothing is in flight."""
        for group in self._groups:
            differs = _differs(group)
            if differs.is_cuda and not group.plan.updated_away:
                self._reads.start(None, differs)  # to follow costs less than to wait for the answer
            elif bool(on_host(differs)):
                self._note_change()
            else:
                continue
            for index, holder in enumerate(group.holders):
                update_master_weights(group, index, holder.detach())


def _can_differ(group: Group) -> bool:
    plan = group.plan
    return not plan.param.divided and group.master is not None and not is_split(group) and not plan.scaled


@torch.no_grad()
def _differs(group: Group) -> torch.Tensor:
    values = update_param(group).to(group.device)
    rounded = read_values(group, device=group.device).to(values.dtype)
    return ((values != rounded) & ~(values.isnan() & rounded.isnan())).any()
