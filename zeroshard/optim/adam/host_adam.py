"""Adam for parameters in host memory by the native kernel: used alone, or sharded like any other optimizer.

    state of a parameter:  step . exp_avg . exp_avg_sq . master (float32, for 16-bit parameters only)

A step is one pass over each parameter; a 16-bit parameter is written together with its float32 master. Rejected: 16-bit
parameters without a master, which don't change when an update is smaller than half of their last digit.
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
from zeroshard.optim.own_optimizers import Parameters, UnshardedOptimizer
from zeroshard.optim.rules import ADAM, ADAMW
from zeroshard.optim.sources import Source, rule_source

_TORCHS_OWN = ("amsgrad", "maximize")
_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "master")


class CPUAdam(UnshardedOptimizer):
    """Adam (arXiv:1412.6980) and AdamW (arXiv:1711.05101) on the processor, in one pass over memory per step.

    Equal to torch.optim.Adam and AdamW up to float32 rounding. Passed to `shard` or `initialize` it becomes the plan's
    Adam or AdamW, wherever the plan keeps the state.

    Args:
        params: parameters or parameter groups; without sharding: float32, bfloat16 or float16, on the CPU.
        adamw_mode: decouple the decay, as AdamW does; else the decay is added to the gradient.
        moments: float32, or bfloat16, rounded to nearest even: 4 bytes less per parameter, and averages that don't
            follow changes below 1/256 of their value.
        threads: number of threads of a step, 1 or more; torch's number if None.

    Raises:
        PlanError: a hyper-parameter is out of range.
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
        """The kernel that computes; chosen at the first step of this optimizer itself."""
        if self._kernel is None:
            self._kernel = host_kernel(self._threads)
        return self._kernel

    def source(self) -> Source:
        """The optimizer as a source for sharding. Raises PlanError for bfloat16 moments."""
        if self._moments != torch.float32:
            raise PlanError(
                "CPUAdam(moments=torch.bfloat16) can't be sharded: a plan keeps moments in float32; leave moments out"
            )
        return rule_source(self._rule, (), self.defaults, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient. Calls `closure` first and returns its result.

        Raises:
            UsageError: a parameter or its gradient is not a dense float tensor on the CPU, or a group sets amsgrad or
                maximize, which only torch's optimizers have.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            asked = [name for name in _TORCHS_OWN if group.get(name)]
            if asked:
                raise UsageError(
                    f"CPUAdam group {number} sets {asked[0]}, which CPUAdam does not support; use torch.optim.AdamW"
                )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, number, self.state[parameter])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of torch.optim.Adam or AdamW.

        Float32 and bfloat16 moments and the master keep the dtype in which they were saved. The master of a 16-bit
        parameter that was saved without one starts from the parameter's value.

        Raises:
            UsageError: a state tensor has another shape than its parameter.
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
        """Groups with the options that torch's Adam does not have, or has under another name."""
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
            # The parameter was written since its last update (load_state_dict of the model, say): the master follows.
            master = state["master"]
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))
        state["step"] += 1
        scalars = adam_scalars(group, int(state["step"]))
        values = parameter.contiguous().view(-1)
        master, out = (state["master"].view(-1), values) if "master" in state else (values, None)
        first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
        self.kernel.step(scalars, master, grad.contiguous().view(-1), (first, second), out)
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
