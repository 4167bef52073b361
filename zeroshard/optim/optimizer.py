"""The optimizer that the user gets: a torch.optim.Optimizer whose step runs on the sharded state.

`param_groups` have the user's own parameters and hyper-parameters, and schedulers write to them; each step reads them.
The arithmetic is done by an UpdateMethod on the regions of the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch

from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.optim.group_options import GroupOptions

ParamGroups = list[dict[str, Any]]
_CONSUMED = (
    "optimizer.step(): the last step consumed its gradients, and they were not dropped since. With a plain "
    "torch optimizer the gradients would still be there, and {would}; here {here}. Call optimizer.zero_grad() after "
    "step() if this is what is meant"
)
_ZEROS = (
    "optimizer.zero_grad(set_to_none=False): gradients are dropped here, as with True, and parameters without a "
    "gradient are not updated. A plain torch optimizer would update those that had one before by gradients of zero: "
    "momentum and weight decay go on. Call zero_grad() for the same numbers in both"
)


class StepHandler(Protocol):
    """What the optimizer calls: runs a step, and answers for the state."""

    def step(self, optimizer: ShardedOptimizer) -> None: ...

    def zero_grad(self) -> None: ...

    @property
    def has_gradients(self) -> bool: ...

    @property
    def overflowed(self) -> bool: ...

    @property
    def leaves_out(self) -> bool: ...

    @property
    def kept_consumed(self) -> bool: ...

    def leave_consumed(self) -> None: ...

    def check_open(self) -> None: ...

    def updates_of(self, parameter: torch.Tensor) -> float | None: ...


def _refuse_write(*_: object, **__: object) -> NoReturn:
    """In place of what would change a dict in which the optimizer never looks."""
    raise UsageError(
        "optimizer.state was to be changed: the state is flat and sharded and not in here, so no step would see it. "
        "zeroshard.safe_set_full_optimizer_state(parameter, value, name), called on all ranks, sets a moment; to begin "
        "anew, close the model (engine.destroy(), zeroshard.close(model)) and shard it with a new optimizer"
    )


class _ReadOnly(dict[Any, Any]):
    """A dict that only its own class fills."""

    __setitem__ = __delitem__ = __ior__ = _refuse_write
    clear = pop = popitem = setdefault = update = _refuse_write


class _EmptyStates(_ReadOnly):
    """`optimizer.state`: an entry for any parameter that is asked for."""

    def __init__(self, handler: StepHandler) -> None:
        super().__init__()
        self._handler = handler

    def __missing__(self, parameter: Any) -> _EmptyState:
        made = _EmptyState(self._handler, parameter)
        dict.__setitem__(self, parameter, made)
        return made


class _EmptyState(_ReadOnly):
    """`optimizer.state[parameter]`: empty, except for `step`, the number of the parameter's updates.

    Reading another state by name raises UsageError, which says where it is.
    """

    def __init__(self, handler: StepHandler, parameter: Any) -> None:
        super().__init__()
        self._handler, self._parameter = handler, parameter

    def __missing__(self, name: str) -> torch.Tensor:
        updates = self._handler.updates_of(self._parameter) if name == "step" else None
        if updates is not None:
            return torch.tensor(updates)
        raise UsageError(
            f"optimizer.state[parameter][{name!r}]: the state is flat and sharded and not in here; "
            f"zeroshard.safe_get_full_optimizer_state(parameter, {name!r}), called on all ranks, returns a copy"
        )


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer of a sharded model; made by `zeroshard.shard` and `zeroshard.initialize`.

    It differs from other optimizers in three ways: `step` consumes the gradients, `state` is empty (the state is flat
    and sharded), and parameters can't be added later.

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
        self._warned = self._warned_of_zeros = False
        self._zeroed = False
        self.name = name
        self.returns_groups = False
        """Whether state_dict() returns hyper-parameters without state, instead of an error; loading is always one."""
        self._states = _EmptyStates(handler)
        super().__init__(groups, dict(defaults))
        self._sealed = True
        self._members = [list(group["params"]) for group in self.param_groups]
        self._options = [GroupOptions(group) for group in self.param_groups]
        if client is not None:  # hooks of the client, registered before or later, run at these steps
            self._optimizer_step_pre_hooks = client._optimizer_step_pre_hooks  # pyright: ignore[reportAttributeAccessIssue]
            self._optimizer_step_post_hooks = client._optimizer_step_post_hooks  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def state(self) -> dict[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of each parameter, `step`; another state is read and set by functions (see `_EmptyState`)."""
        return self._states

    @state.setter
    def state(self, value: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._sealed:
            _refuse_write()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update with the gradients of the backwards since the last step.

        Raises:
            UsageError: a closure was given, the model is closed, or groups changed in a way that can't be stepped.
            NonFiniteError, DivergenceError: see `StepperBase.step`; nothing was updated.
        """
        if closure is not None:
            raise UsageError("step(closure): the gradients are reduced in the backward; call backward before step")
        self._handler.check_open()
        self.check_groups()
        if not self._warned and self._handler.kept_consumed:
            self._warn_of_consumed()
        if self._zeroed and not self._warned_of_zeros and self._handler.leaves_out:
            self._warned_of_zeros = True
            warnings.warn(_ZEROS, ZeroShardWarning, stacklevel=2)
        consumes = self._handler.has_gradients
        try:
            self._handler.step(self)
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            raise UsageError(f"a hyper-parameter, or a product of some, is too large to step with: {error}") from error
        if self._client is not None:
            # A torch scheduler over the client's optimizer checks this, and warns if it steps before the optimizer.
            self._client.__dict__["_opt_called"] = True
        if consumes and not self._warned:
            self._handler.leave_consumed()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all backwards since the last step; with False, too, they are None, and not zeros."""
        self._zeroed = not set_to_none
        self._handler.zero_grad()

    def _warn_of_consumed(self) -> None:
        """Once: where a script does without zero_grad(), the numbers are not those of torch's optimizer."""
        self._warned = True
        fresh = self._handler.has_gradients
        would = "the new ones be added to them" if fresh else "be applied once more"
        here = "the new ones are applied alone" if fresh else "nothing is updated"
        warnings.warn(_CONSUMED.format(would=would, here=here), ZeroShardWarning, stacklevel=3)

    def rates(self) -> list[float]:
        """The learning rate of each group. Raises UsageError for an optimizer that has none."""
        if any("lr" not in group for group in self.param_groups):
            raise UsageError(f"the groups of {self.name} have no 'lr'")
        return [float(group["lr"]) for group in self.param_groups]

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped since gradients overflowed. With a loss scale it waits for the device."""
        return self._handler.overflowed

    @property
    def client(self) -> torch.optim.Optimizer | None:
        """The optimizer that the user built, None where the config names one."""
        return self._client

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError, since the state is sharded; with `returns_groups` returns the hyper-parameters alone."""
        if self.returns_groups:
            groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
            return {"state": {}, "param_groups": groups}
        raise UsageError(
            "optimizer.state_dict(): the state is sharded and not in here; engine.save_checkpoint(directory) saves it"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises UsageError, since the state is sharded."""
        raise UsageError(
            "optimizer.load_state_dict(): the state is sharded and would not be loaded; "
            "engine.load_checkpoint(directory) loads it"
        )

    def __getstate__(self) -> NoReturn:
        """For pickle and copy. Raises UsageError: both would include shards and communicators."""
        raise UsageError(
            "a sharded optimizer can't be copied or pickled (torch.save, copy.deepcopy): its state belongs to this "
            "rank; engine.save_checkpoint(directory) or zeroshard.save(model, directory) saves it"
        )

    def check_groups(self) -> None:
        """Raises UsageError unless the groups have the same parameters, in the same order, as at the start.

        Hyper-parameters may have other values.
        """
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
