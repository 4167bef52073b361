"""The optimizer that the user holds: a real torch.optim.Optimizer whose step runs on the sharded state.

`param_groups` are live: they hold the user's own parameters and hyper-parameters, and schedulers write to them. The
arithmetic is done by an UpdateMethod on the regions of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from zeroshard.errors import UsageError

ParamGroups = list[dict[str, Any]]


class StepHandler(Protocol):
    """Who runs a step when `optimizer.step()` is called."""

    def step(self, optimizer: ShardedOptimizer) -> None: ...

    def zero_grad(self) -> None: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps sharded state; made by `zeroshard.shard` and `zeroshard.initialize`.

    Differences to other optimizers: `step` consumes the gradients, `state` is empty (the state is flat and sharded),
    and parameters can't be added later.

    Args:
        client: the optimizer that the user built, whose groups these are.
    """

    def __init__(
        self,
        groups: ParamGroups,
        defaults: Mapping[str, Any],
        handler: StepHandler,
        name: str,
        client: torch.optim.Optimizer | None = None,
    ) -> None:
        self._handler = handler
        self._client = client
        self._sealed = False
        self.name = name
        super().__init__(groups, dict(defaults))
        self._sealed = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update from the gradients of the backwards since the last step."""
        if closure is not None:
            raise UsageError("step(closure): the gradients are reduced in the backward; call backward before step")
        self._handler.step(self)
        if self._client is not None:
            # A torch scheduler that was built over the client's optimizer looks there whether a step came before its
            # own, and warns of a wrong order otherwise.
            self._client.__dict__["_opt_called"] = True
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all backwards since the last step."""
        self._handler.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise UsageError(
                "parameters can't be added to a sharded optimizer; pass all groups to shard()/initialize()"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()}"
