"""Steps on the host: what they compute, in every combination of dtypes, sizes and addresses, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from zeroshard.errors import UsageError
from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.scalars import adam_scalars
from zeroshard.optim.kernels.adam import adam_twin
from zeroshard.optim.rules import ADAM, ADAMW, Rule


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["decoupled", "coupled"])
def test_adam_gives_the_bits_of_the_device_kernels_twin(rule: Rule) -> None:
    numel = 70_001  # more than a block of the twin
    torch.manual_seed(0)
    master, grad = torch.randn(numel), torch.randn(numel).bfloat16()
    mine = (master, torch.zeros(numel), torch.zeros(numel), torch.empty(numel, dtype=torch.bfloat16))
    theirs = tuple(tensor.clone() for tensor in mine)
    hyper = {**rule.defaults, "weight_decay": 0.1}
    for step in (1, 2, 3):
        scalars = adam_scalars(hyper, step, 0.3)
        host_kernel().adam(scalars, mine[0], grad, mine[1], mine[2], mine[3])
        values = [scalars.coefficient, scalars.decay, scalars.step_size, scalars.correction, scalars.eps]
        rows = torch.tensor([[1.0, *values, scalars.one_beta1, scalars.beta2, scalars.one_beta2]])
        tiles = torch.tensor([[0, numel, 0]], dtype=torch.int32)
        adam_twin(theirs[0], theirs[3], grad, theirs[1], theirs[2], tiles, rows, decoupled=scalars.decoupled)
    assert all(torch.equal(ours, other) for ours, other in zip(mine, theirs, strict=True))


def test_what_a_kernel_can_not_take_is_refused_by_name() -> None:
    kernel, scalars = host_kernel(), adam_scalars(ADAMW.defaults, 1)
    good = {name: torch.zeros(8) for name in ("master", "grad", "exp_avg", "exp_avg_sq", "out")}
    wrong = {
        "master is bfloat16; it takes float32": {"master": torch.zeros(8, dtype=torch.bfloat16)},
        "grad is int32; it takes bfloat16 or float16 or float32": {"grad": torch.zeros(8, dtype=torch.int32)},
        "exp_avg is float16; it takes float32 or bfloat16": {"exp_avg": torch.zeros(8, dtype=torch.float16)},
        "exp_avg_sq is bfloat16; it takes float32": {"exp_avg_sq": torch.zeros(8, dtype=torch.bfloat16)},
        "out is float64": {"out": torch.zeros(8, dtype=torch.float64)},
        "grad is on meta": {"grad": torch.zeros(8, device="meta")},
        r"grad has shape \(2, 4\)": {"grad": torch.zeros(2, 4)},
        r"exp_avg has shape \(8,\) and strides \(2,\)": {"exp_avg": torch.zeros(16)[::2]},
        "exp_avg_sq has 7 elements where the first tensor has 8": {"exp_avg_sq": torch.zeros(7)},
        "master and out overlap|out and master overlap": {"out": good["master"]},
    }
    for message, change in wrong.items():
        tensors = {**good, **change}
        with pytest.raises(UsageError, match=message):
            kernel.adam(scalars, *(tensors[name] for name in good))
