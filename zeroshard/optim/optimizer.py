"""The optimizer that the user holds: a real torch.optim.Optimizer whose step runs on the sharded state.

`param_groups` are live: they hold the user's own parameters and hyper-parameters, and schedulers write to them. The
arithmetic is done by an UpdateMethod on the regions of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.hyper import GroupOptions

ParamGroups = list[dict[str, Any]]


class StepHandler(Protocol):
    """Who runs a step when `optimizer.step()` is called."""

    def step(self, optimizer: ShardedOptimizer) -> None: ...

    def zero_grad(self) -> None: ...

    @property
    def overflowed(self) -> bool: ...

    def check_open(self) -> None: ...

    def updates_of(self, parameter: torch.Tensor) -> float | None: ...


class _States(dict[Any, "_StateElsewhere"]):
    """What `optimizer.state` is."""

    def __init__(self, handler: StepHandler) -> None:
        super().__init__()
        self._handler = handler

    def __missing__(self, parameter: Any) -> _StateElsewhere:
        made = self[parameter] = _StateElsewhere(self._handler, parameter)
        return made


class _StateElsewhere(dict[str, Any]):
    """What `optimizer.state[parameter]` is: empty, but for `step`, the number of the parameter's updates.

    Whoever asks for another state by name is told where it is.
    """

    def __init__(self, handler: StepHandler, parameter: Any) -> None:
        super().__init__()
        self._handler, self._parameter = handler, parameter

    def __missing__(self, name: str) -> torch.Tensor:
        updates = self._handler.updates_of(self._parameter) if name == "step" else None
        if updates is not None:
            return torch.tensor(updates)
        raise UsageError(
            f"optimizer.state[parameter][{name!r}]: the state is flat and sharded and not in here; on all ranks "
            f"zeroshard.safe_get_full_optimizer_state(parameter, {name!r}) gives a copy"
        )


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
        self.hands_out_groups = False
        """Whether state_dict() gives hyper-parameters without state, in place of an error; loading them stays one."""
        super().__init__(groups, dict(defaults))
        self.state = _States(handler)  # pyright: ignore[reportAttributeAccessIssue]
        self._sealed = True
        self._members = [list(group["params"]) for group in self.param_groups]
        self._options = [GroupOptions(group) for group in self.param_groups]
        if client is not None:  # hooks that were, or will be, registered there belong to these steps
            self._optimizer_step_pre_hooks = client._optimizer_step_pre_hooks  # pyright: ignore[reportAttributeAccessIssue]
            self._optimizer_step_post_hooks = client._optimizer_step_post_hooks  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update from the gradients of the backwards since the last step."""
        if closure is not None:
            raise UsageError("step(closure): the gradients are reduced in the backward; call backward before step")
        self._handler.check_open()
        self.check_groups()
        try:
            self._handler.step(self)
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            raise UsageError(f"a hyper-parameter, or a product of some, is too large to step with: {error}") from error
        if self._client is not None:
            # A torch scheduler that was built over the client's optimizer looks there whether a step came before its
            # own, and warns of a wrong order otherwise.
            self._client.__dict__["_opt_called"] = True
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all backwards since the last step."""
        self._handler.zero_grad()

    def rates(self) -> list[float]:
        """The learning rate of each group. Raises UsageError for an optimizer that has none."""
        if any("lr" not in group for group in self.param_groups):
            raise UsageError(f"the groups of {self.name} have no 'lr'")
        return [float(group["lr"]) for group in self.param_groups]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for its loss scale. False without one, and then it waits for nothing."""
        return self._handler.overflowed

    @property
    def client(self) -> torch.optim.Optimizer | None:
        """The optimizer that the user built, None where the config names one."""
        return self._client

    def state_dict(self) -> dict[str, Any]:
        """Refused, the state is sharded: raises UsageError. Hyper-parameters alone where `hands_out_groups`."""
        if self.hands_out_groups:
            groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
            return {"state": {}, "param_groups": groups}
        raise UsageError(
            "optimizer.state_dict(): the state is sharded and not in here; engine.save_checkpoint(directory) saves it"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refused: the state is sharded. Raises UsageError."""
        raise UsageError(
            "optimizer.load_state_dict(): the state is sharded and would not be loaded; "
            "engine.load_checkpoint(directory) loads it"
        )

    def __getstate__(self) -> NoReturn:
        """Refused, for pickle and copy: both would take the shards and communicators along. Raises UsageError."""
        raise UsageError(
            "a sharded optimizer can't be copied or pickled (torch.save, copy.deepcopy): its state belongs to this "
            "rank; engine.save_checkpoint(directory) or zeroshard.save(model, directory) saves it"
        )

    def check_groups(self) -> None:
        """The groups may have other hyper-parameters than at the start, but the same parameters in the same order."""
        same = len(self.param_groups) == len(self._members) and all(
            len(group["params"]) == len(members) and all(a is b for a, b in zip(group["params"], members, strict=True))
            for group, members in zip(self.param_groups, self._members, strict=True)
        )
        if not same:
            raise UsageError(
                "the optimizer's param_groups hold other parameters, or another order, than when the model was "
                "sharded; to leave some out set their lr to 0 or freeze them with requires_grad_(False)"
            )
        if self._client is not None and len(self._client.param_groups) != len(self._members):
            raise UsageError(
                f"the {type(self._client).__name__} that was passed has other parameter groups than when the model was "
                "sharded, and what was added there is not trained; pass all groups to shard()/initialize()"
            )
        for number, (group, options) in enumerate(zip(self.param_groups, self._options, strict=True)):
            options.check(number, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise UsageError(
                "parameters can't be added to a sharded optimizer; pass all groups to shard()/initialize()"
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"Sharded {self.name}{super().__repr__().removeprefix(type(self).__name__)}"
