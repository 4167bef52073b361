"""Adam for parameters in host memory by the native kernel: alone, without a plan, or to be sharded like any other.

    state of a parameter:  step . exp_avg . exp_avg_sq . master (float32, for 16-bit parameters only)

One pass over each parameter, in which a 16-bit one is written beside its float32 master. Rejected: 16-bit parameters
without a master, whose updates round away once they are smaller than half of a last place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from zeroshard.errors import PlanError, UsageError
from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.kernel import MOMENTS, OUTPUTS, HostKernel
from zeroshard.optim.host.scalars import adam_scalars
from zeroshard.optim.named import Parameters, SourcedOptimizer
from zeroshard.optim.rules import ADAM, ADAMW
from zeroshard.optim.sources import Source, rule_source

_TORCHS_OWN = ("amsgrad", "maximize")
_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "master")


class CPUAdam(SourcedOptimizer):
    """Adam (arXiv:1412.6980) and AdamW (arXiv:1711.05101) on the processor, in one pass over memory per step.

    Equal to torch.optim.Adam and AdamW to float32 rounding. Passed to `shard` or `initialize` it is Adam or AdamW of
    the plan, wherever that puts its state.

    Args:
        params: parameters or parameter groups; to step alone: float32, bfloat16 or float16, on the CPU.
        adamw_mode: decoupled decay, as AdamW has it; else the decay is added to the gradient.
        moments: float32, or bfloat16, rounded to nearest even: 4 bytes a parameter less, and averages that no longer
            follow changes below 1/256 of themselves.
        threads: what a step takes, 1 or more; torch's number if None.

    Raises:
        PlanError: hyper-parameters have no meaning.
        UsageError: `moments` is another dtype, or `threads` no whole number of at least 1.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        moments: torch.dtype = torch.float32,
        threads: int | None = None,
    ) -> None:
        if moments not in MOMENTS:
            raise UsageError(f"CPUAdam moments={moments}: they are torch.float32 or torch.bfloat16")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise UsageError(f"CPUAdam threads={threads!r}: a whole number of at least 1, or None")
        self._rule = ADAMW if adamw_mode else ADAM
        self._moments = moments
        self._threads = threads
        self._kernel: HostKernel | None = None
        self._written: dict[int, int] = {}
        """By the id of a parameter with a master, its version after its last update."""
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**given, "bias_correction": bias_correction, "decoupled": adamw_mode})
        for group in self.param_groups:
            self._rule.check(group)

    @property
    def kernel(self) -> HostKernel:
        """Who computes; chosen at the first step that this optimizer takes itself."""
        if self._kernel is None:
            self._kernel = host_kernel(self._threads)
        return self._kernel

    def source(self) -> Source:
        """What it becomes when it is sharded. Raises PlanError for bfloat16 moments."""
        if self._moments != torch.float32:
            raise PlanError("CPUAdam(moments=torch.bfloat16) steps alone only: a plan keeps moments in float32")
        return rule_source(self._rule, (), self.defaults, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient; returns what `closure` does, which is called first.

        Raises:
            UsageError: a parameter or its gradient is not a dense float tensor on the CPU, or a group asks for
                amsgrad or maximize, which torch's have and this has not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            asked = [name for name in _TORCHS_OWN if group.get(name)]
            if asked:
                raise UsageError(f"CPUAdam group {number} says {asked[0]}, which it has not; use torch.optim.AdamW")
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, number, self.state[parameter])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, also one of torch.optim.Adam or AdamW.

        Float32 and bfloat16 moments and the master keep the dtype in which they were saved. A 16-bit parameter that
        was saved without a master begins one from its own value.

        Raises:
            UsageError: state of another shape than its parameter.
        """
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        owned = list(chain.from_iterable(group["params"] for group in self.param_groups))
        states = [state_dict["state"].get(key, {}) for key in saved]
        for parameter, state in zip(owned, states, strict=False):  # other lengths are torch's own error
            _check_shapes(parameter, state)
        super().load_state_dict({**state_dict, "param_groups": self._as_ours(state_dict["param_groups"])})
        for parameter, state in zip(owned, states, strict=True):
            for name, value in state.items():
                if name in _ELEMENTWISE:
                    # torch has cast it to the parameter's dtype.
                    dtype = value.dtype if value.dtype in MOMENTS else self._moments
                    self.state[parameter][name] = value.detach().to("cpu", dtype, copy=True).contiguous()
            if state and "master" not in state and parameter.dtype != torch.float32:
                self.state[parameter]["master"] = parameter.detach().float().contiguous()

    def _as_ours(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups with what torch's Adam leaves out or names otherwise."""
        filled: list[dict[str, Any]] = []
        for number, group in enumerate(groups):
            own = self.param_groups[min(number, len(self.param_groups) - 1)]
            decoupled = group.get("decoupled_weight_decay", own["decoupled"])
            filled.append({"decoupled": decoupled, "bias_correction": own["bias_correction"], **group})
        return filled

    def _update(
        self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], number: int, state: dict[str, Any]
    ) -> None:
        _check(parameter, grad, number)
        if not state:
            self._begin(parameter, state)
        elif "master" in state and self._written.get(id(parameter), parameter._version) != parameter._version:
            # Changed in place since (load_state_dict of the model, say): its master follows where it was.
            master = state["master"]
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        state["step"] += 1
        scalars = adam_scalars(group, int(state["step"]))
        values = parameter.contiguous().view(-1)
        master, out = (state["master"].view(-1), values) if "master" in state else (values, None)
        first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        self.kernel.adam(scalars, master, grad.contiguous().view(-1), first, second, out)
        if values.data_ptr() != parameter.data_ptr():
            parameter.copy_(values.view(parameter.shape))
        self._written[id(parameter)] = parameter._version

    def _begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros(())
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.shape, dtype=self._moments)
        if parameter.dtype != torch.float32:
            state["master"] = parameter.detach().float().contiguous()


def _check_shapes(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name in _ELEMENTWISE and value.shape != parameter.shape:
            raise UsageError(
                f"CPUAdam.load_state_dict: {name} of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}; load the state of the same model, its parameters in the same order"
            )


def _check(parameter: torch.Tensor, grad: torch.Tensor, number: int) -> None:
    """Raises UsageError for what CPUAdam can't step."""
    where = f"CPUAdam group {number}: a parameter of shape {tuple(parameter.shape)}"
    if parameter.device.type != "cpu":
        raise UsageError(f"{where} is on {parameter.device}; move the model to the CPU, or shard it")
    if parameter.dtype not in OUTPUTS:
        raise UsageError(f"{where} is {parameter.dtype}; it takes float32, bfloat16 and float16")
    if grad.layout != torch.strided:
        raise UsageError(f"{where} has a sparse gradient; use torch.optim.SparseAdam, or sparse=False")
