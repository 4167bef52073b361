"""Plain, unsharded optimizers that torch does not have, from their papers: to compare the sharded ones with.

Operations are in the order in which the sharded ones do them where that matters for the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from zeroshard.optim.dion.orthonormal import first_factor


class _Plain(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient, with its own state and step number."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, state in self._due():
            state["step"] = state.get("step", 0) + 1
            assert parameter.grad is not None
            self.update(parameter, parameter.grad, state, group)

    def _due(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, self.state[parameter]

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        raise AssertionError


def _held(state: dict[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    return state.setdefault(name, torch.zeros_like(like))


class PlainLion(_Plain):
    """arXiv:2302.06675, program 1."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        m = _held(state, "m", p)
        beta1, beta2 = hyper["betas"]
        p.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        p.add_(torch.sign(m * beta1 + g * (1 - beta1)), alpha=-hyper["lr"])
        m.mul_(beta2).add_(g, alpha=1 - beta2)


class PlainLamb(_Plain):
    """arXiv:1904.00962, algorithm 2, with bounds of the ratio and bias corrections on the rate."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        m, v = _held(state, "m", p), _held(state, "v", p)
        beta1, beta2 = hyper["betas"]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v + hyper["eps"]).sqrt() if hyper["eps_inside_sqrt"] else v.sqrt() + hyper["eps"]
        u = m / denominator + hyper["weight_decay"] * p
        weight, update = float(p.double().norm()), float(u.double().norm())
        ratio = min(max(weight / update, hyper["min_coeff"]), hyper["max_coeff"]) if weight and update else 1.0
        rate = hyper["lr"]
        if hyper["bias_correction"]:
            rate = rate * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        p.sub_(u * (rate * ratio))


class PlainMuon(_Plain):
    """Muon as torch.optim.Muon computes it for groups with `use_muon`, also for stacks of them; AdamW for others."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        if not hyper["use_muon"]:
            _adamw(p, g, state, hyper)
            return
        m = _held(state, "m", p)
        m.lerp_(g, 1 - hyper["momentum"])
        u = (g.lerp(m, hyper["momentum"]) if hyper["nesterov"] else m).bfloat16()
        stack = u.view(-1, *u.shape[-2:]) if u.dim() == 3 else u.reshape(1, len(u), -1)
        rows, columns = stack.shape[1:]
        scale = math.sqrt(max(1, rows / columns))
        if hyper["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        done = torch.stack([newton_schulz(matrix, hyper["ns_steps"]) for matrix in stack]).view(p.shape)
        p.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        p.add_(done, alpha=-(hyper["lr"] * scale))


class PlainDion(_Plain):
    """arXiv:2504.05295, algorithm 1, for groups with `use_dion`, also for stacks of matrices; AdamW for others.

    Left factors are made orthonormal by Householder reflections. Directions along which the momentum is 1e-5 of its
    largest are left out: an orthonormal factor would make them, which are rounding, as large as the rest.
    """

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        if not hyper["use_dion"]:
            _adamw(p, g, state, hyper)
            return
        stack = p.shape if p.dim() == 3 else (1, len(p), p.numel() // len(p))
        batch, rows, columns = stack
        rank = min(rows, columns, math.ceil(hyper["rank_fraction"] * min(rows, columns)))
        if "m" not in state:
            state["m"] = torch.zeros(stack)
            state["q"] = [first_factor(rank, columns, p.device)] * batch
        state["m"].add_(g.view(stack))
        p.mul_(1 - hyper["lr"] * hyper["weight_decay"])
        for index in range(batch):
            m, q = state["m"][index].double(), state["q"][index].double().T
            left = torch.linalg.qr(m @ q).Q
            right = m.T @ left
            norms = right.norm(dim=0)
            live = norms > 1e-5 * norms.max()
            left = left * live
            state["m"][index] = m - (1 - hyper["mu"]) * left @ right.T
            following = torch.where(live, right / norms, q)
            state["q"][index] = following.T.float()
            p.view(stack)[index].sub_(hyper["lr"] * math.sqrt(rows / columns) * (left @ following.T).float())


def _adamw(p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
    m, v = _held(state, "m", p), _held(state, "v", p)
    beta1, beta2 = hyper["betas"]
    p.mul_(1 - hyper["lr"] * hyper["weight_decay"])
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (v.sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(hyper["eps"])
    p.addcdiv_(m, denominator, value=-hyper["lr"] / (1 - beta1 ** state["step"]))


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The quintic iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class PlainLowBit(_Plain):
    """Adam (decoupled decay or not) whose moments are rounded to `zeros` tensors after each update.

    Parameters of fewer than 4096 elements, or no whole number of blocks, keep them in float32 (arXiv:2110.02861).
    """

    def __init__(self, params: Any, *, zeros: Any, block: int, decoupled: bool, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        self._zeros, self._block, self._decoupled = zeros, block, decoupled

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        if p.numel() < 4096 or p.numel() % self._block:
            self._adam(p, g, state, hyper)
            return
        if "first" not in state:
            state["first"] = self._zeros((p.numel(),), True, self._block)
            state["second"] = self._zeros((p.numel(),), False, self._block)
        held = {"step": state["step"], "m": state["first"].dequantize(), "v": state["second"].dequantize()}
        held = {key: value.view(p.shape) if key != "step" else value for key, value in held.items()}
        self._adam(p, g, held, hyper)
        state["first"].copy_(held["m"].view(-1))
        state["second"].copy_(held["v"].view(-1))

    def _adam(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], hyper: dict[str, Any]) -> None:
        if self._decoupled:
            _adamw(p, g, state, hyper)
        else:
            _adamw(p, g.add(p, alpha=hyper["weight_decay"]), state, {**hyper, "weight_decay": 0.0})
