"""Hooks on modules, beside torch.compile: they run outside of compiled code, or are left out of it.

    eager, and around compiled modules    the hook runs; torch.compile does not look into it
    inside of a module that is compiled   left out, where the running pass needs nothing of it; else the graph breaks

torch.compile never sees the hooks of the module that it compiles itself. While it traces the modules inside, it takes
`_run_traced` for `_run`, and each condition there that reads an attribute becomes a guard of the compiled code. So code
that was compiled within a pass does not run outside of one, nor for another model of the same class before that one's
passes expect it. Rejected: hooks as operations in the graph, since a compiler orders these by the tensors that they
take, and a hook takes none. Rejected: `torch.compiler.is_compiling()` in the hook. It costs time in each hook, and
torch.compile asks it in the frame of a hook that it finds outside of compiled code, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from zeroshard.engine.core.forward import Forward
from zeroshard.errors import UsageError

_UNTRACED = (
    "zeroshard gathers and releases the parameters of a sharded model between its units, outside of compiled code, and "
    "begins the passes of a model outside of it. Compile it without fullgraph=True"
)


class Hook:
    """A hook that can't be copied: in a copy of the module it would work on the shards of the original."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Pickle and copy come here. Raises UsageError."""
        raise UsageError(
            "a sharded model, or a part of one, can't be copied or pickled (copy.deepcopy, torch.save(model)): its "
            "shards and communicators belong to it alone. Use zeroshard.full_state_dict(model) for its weights, which "
            "a model that is not sharded loads, and zeroshard.save(model, directory) to go on training"
        )


class OutsideHook(Hook):
    """A hook that runs outside of compiled code, which ends before it."""

    def left_out(self) -> bool:
        """Whether compiled code goes on without the hook; torch.compile traces this."""
        return False


class WholeUnitHook(OutsideHook):
    """A hook of a unit in a model all of whose units rest whole, left out within a pass."""

    def __init__(self, function: Callable[..., None], forward: Forward) -> None:
        super().__init__(function)
        self._forward = forward

    def left_out(self) -> bool:
        if self._forward.inside is None:
            return False
        self._forward.expect_compiled()
        return self._forward.compiled


class PassHook(OutsideHook):
    """A hook of a module at which a pass may begin and end, left out within the pass of another module.

    Args:
        number: of the module, as the forward knows it.
    """

    def __init__(self, function: Callable[..., None], forward: Forward, number: int) -> None:
        super().__init__(function)
        self._forward, self._number = forward, number

    def left_out(self) -> bool:
        return self._forward.inside is not None and self._forward.inside != self._number


def registrable(hook: OutsideHook) -> Callable[..., None]:
    """What to register on the module."""
    return partial(_run, hook)  # has no frame of its own, which torch.compile would trace


# torch.compile shows the reason if it is not allowed to break the graph.
@torch.compiler.disable(reason=_UNTRACED)
def _run(hook: OutsideHook, *args: Any) -> None:
    hook.function(*args)


@torch.compiler.disable(reason=_UNTRACED)
def _run_between_graphs(hook: OutsideHook, *args: Any) -> None:
    hook.function(*args)


@torch.compiler.substitute_in_graph(_run)
def _run_traced(hook: OutsideHook, *args: Any) -> None:
    """What torch.compile traces where a module that it compiles calls another one, which has the hook."""
    if not hook.left_out():
        _run_between_graphs(hook, *args)
