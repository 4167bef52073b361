"""Steps on the host: what they compute, in every combination of dtypes, sizes and addresses, and what they refuse."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.optim.host import choose
from zeroshard.optim.host.choose import host_kernel
from zeroshard.optim.host.kernel import HostKernel, Squares
from zeroshard.optim.host.native import NativeBackend, instruction_sets, load_library
from zeroshard.optim.host.scalars import adagrad_scalars, adam_scalars, lion_scalars, scalars_of
from zeroshard.optim.host.torch_twin import BLOCK, TorchTwin
from zeroshard.optim.kernels.adam import adam_twin
from zeroshard.optim.rules import ADAGRAD, ADAM, ADAMW, LION, SGD, Rule

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = (torch.float32, torch.bfloat16)
OUTPUTS = (None, *GRADIENTS)
TWIN = HostKernel(TorchTwin(), 1, "oracle")
LIBRARY, WHY = load_library()
native = pytest.mark.skipif(LIBRARY is None, reason=f"native kernels: {WHY}")

Tensors = Sequence[torch.Tensor]
Run = Callable[[HostKernel, torch.Tensor, torch.Tensor, Tensors, "torch.Tensor | None"], None]
"""(kernel, master, gradient, states, out)"""


def natives(threads: Sequence[int]) -> list[HostKernel]:
    """All instruction sets of this processor with each number of threads."""
    assert LIBRARY is not None
    sets = range(len(instruction_sets(LIBRARY)))
    return [HostKernel(NativeBackend(LIBRARY, number), count, "test") for number in sets for count in threads]


def adam(decoupled: bool) -> Run:
    hyper = {**ADAMW.defaults, "weight_decay": 0.1, "decoupled": decoupled}
    return lambda kernel, p, g, s, out: kernel.step(adam_scalars(hyper, 7, 0.37), p, g, s, out)


def lion(kernel: HostKernel, p: torch.Tensor, g: torch.Tensor, s: Tensors, out: torch.Tensor | None) -> None:
    kernel.step(lion_scalars({**LION.defaults, "weight_decay": 0.1}, 7, 0.37), p, g, s[:1], out)


def adagrad(kernel: HostKernel, p: torch.Tensor, g: torch.Tensor, s: Tensors, out: torch.Tensor | None) -> None:
    hyper = {**ADAGRAD.defaults, "weight_decay": 0.1, "lr_decay": 0.1}
    kernel.step(adagrad_scalars(hyper, 7, 0.37), p, g, s[1:], out)


RULES: dict[str, Run] = {"adamw": adam(True), "adam": adam(False), "lion": lion, "adagrad": adagrad}


def shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that starts `by` elements behind an aligned address."""
    return torch.cat([torch.zeros(by, dtype=values.dtype), values])[by:]


def with_nonfinite(grad: torch.Tensor) -> torch.Tensor:
    """Infinities, NaN, zeros and denormal numbers among the first elements, as far as there are any."""
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-7, 1e-40, 6e4]).to(grad.dtype)
    grad[: odd.numel()] = odd[: grad.numel()]
    return grad


def result(run: Run, kernel: HostKernel, tensors: Tensors, out: torch.dtype | None) -> list[torch.Tensor]:
    """What is in master, states and output after a step, at odd addresses; the gradient must be as it was."""
    master, grad, *states = (shifted(tensor, 3 + index) for index, tensor in enumerate(tensors))
    written = None if out is None else shifted(torch.zeros(master.numel(), dtype=out), 1)
    run(kernel, master, grad, states, written)
    assert_same([grad], [tensors[1]])
    return [master, *states, *([] if written is None else [written])]


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(nan=3.0), other.nan_to_num(nan=3.0))
        assert torch.equal(one.signbit() & one.isfinite(), other.signbit() & other.isfinite())


def sample(numel: int, grad: torch.dtype, moment: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(numel)
    gradient = with_nonfinite((torch.randn(numel) * 0.1).to(grad))
    states = [(torch.randn(numel) * 0.01).to(moment), (torch.rand(numel) * 0.001).to(moment)]
    return [torch.randn(numel), gradient, *states]


@native
@pytest.mark.parametrize("rule", RULES)
def test_every_instruction_set_gives_the_twins_bits_for_all_dtypes(rule: str) -> None:
    for grad, moment, out in product(GRADIENTS, MOMENTS, OUTPUTS):
        tensors = sample(2 * 32 + 19, grad, moment)
        expected = result(RULES[rule], TWIN, tensors, out)
        for kernel in natives([1]):
            assert_same(result(RULES[rule], kernel, tensors, out), expected)


@native
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 8192 * 3 + 5, BLOCK + 17])
def test_every_number_of_threads_gives_the_twins_bits_at_all_sizes(numel: int) -> None:
    tensors = sample(numel, torch.bfloat16, torch.float32)
    expected = result(RULES["adamw"], TWIN, tensors, torch.bfloat16)
    for kernel in natives([1, 2, 3]):
        assert_same(result(RULES["adamw"], kernel, tensors, torch.bfloat16), expected)


@pytest.mark.parametrize("rule", RULES)
def test_the_output_may_take_the_gradients_place(rule: str) -> None:
    kernels = [TWIN] if LIBRARY is None else [TWIN, *natives([1, 2])]
    for dtype, numel, kernel in product(GRADIENTS, (32 * 3 + 19, BLOCK + 17), kernels):
        tensors = sample(numel, dtype, torch.float32)
        *expected, apart = result(RULES[rule], TWIN, tensors, dtype)
        master, grad, *states = (shifted(tensor, 1) for tensor in tensors)
        RULES[rule](kernel, master, grad, states, grad)
        assert_same([master, *states, grad], [*expected, apart])


@native
@pytest.mark.parametrize("out", GRADIENTS)
def test_an_output_written_past_the_caches_is_the_same(out: torch.dtype) -> None:
    numel = (1 << 20) + 37  # from 2**20 elements on, where the address allows it
    tensors = sample(numel, torch.bfloat16, torch.bfloat16)
    apart = result(RULES["adamw"], TWIN, tensors, out)[-1]
    for kernel in natives([2])[:2]:
        master, grad, *states = (tensor.clone() for tensor in tensors)
        aligned = torch.empty(numel, dtype=out)
        assert aligned.data_ptr() % 64 == 0
        RULES["adamw"](kernel, master, grad, states, aligned)
        assert_same([aligned], [apart])


@pytest.mark.parametrize("kernel", [TWIN, host_kernel()], ids=["twin", "chosen"])
@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["decoupled", "coupled"])
def test_adam_agrees_with_the_device_kernels_twin_to_float32_rounding(rule: Rule, kernel: HostKernel) -> None:
    numel = 5000
    torch.manual_seed(0)
    master, grad = torch.randn(numel), torch.randn(numel).bfloat16()
    mine = (master, torch.zeros(numel), torch.zeros(numel), torch.empty(numel, dtype=torch.bfloat16))
    theirs = tuple(tensor.clone() for tensor in mine)
    hyper = {**rule.defaults, "weight_decay": 0.1}
    for step in (1, 2, 3):
        scalars = adam_scalars(hyper, step, 0.3)
        kernel.step(scalars, mine[0], grad, mine[1:3], mine[3])
        values = [scalars.coefficient, scalars.decay, scalars.step_size, scalars.correction, scalars.eps]
        rows = torch.tensor([[1.0, *values, scalars.one_beta1, scalars.beta2, scalars.one_beta2]])
        tiles = torch.tensor([[0, numel, 0]], dtype=torch.int32)
        adam_twin(theirs[0], theirs[3], grad, theirs[1], theirs[2], tiles, rows, decoupled=scalars.decoupled)
    for moment, other in zip(mine[1:3], theirs[1:3], strict=True):
        if scalars.decoupled:
            assert torch.equal(moment, other)
        else:  # decay is added to the gradient, so the master's last place reaches the moments
            torch.testing.assert_close(moment, other, rtol=2.0**-20, atol=1e-9)
    torch.testing.assert_close(mine[0], theirs[0], rtol=2.0**-22, atol=1e-9)
    assert torch.equal(mine[3], mine[0].bfloat16())


@pytest.mark.parametrize("kernel", [TWIN, host_kernel()], ids=["twin", "chosen"])
@pytest.mark.parametrize("rule", [ADAMW, ADAM, LION, ADAGRAD], ids=lambda rule: rule.name)
def test_a_rule_on_the_host_agrees_with_the_rule_to_float32_rounding(rule: Rule, kernel: HostKernel) -> None:
    numel = 5000
    torch.manual_seed(1)
    scalars = scalars_of(rule)
    assert scalars is not None
    hyper = {**rule.defaults, "weight_decay": 0.1}
    mine, theirs = ([torch.randn(numel, generator=torch.Generator().manual_seed(2))] for _ in range(2))
    for tensors in (mine, theirs):
        tensors += [torch.full((numel,), 1e-3) for _ in rule.state]
    param = torch.empty(numel, dtype=torch.bfloat16)
    for step in (1, 2, 3):
        grad = torch.randn(numel).bfloat16()
        kernel.step(scalars(hyper, step, 0.3), mine[0], grad, mine[1:], param)
        rule.update(theirs[0], grad.float().mul_(0.3), theirs[1:], hyper, step)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-21, atol=1e-7)
    assert torch.equal(param, mine[0].bfloat16())


def test_a_rule_that_no_kernel_computes_is_left_to_itself() -> None:
    assert scalars_of(SGD) is None


@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("numel", [1, 31, 16_384, BLOCK + 16_385])
def test_squares_are_summed_in_float64_whatever_the_threads(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(0)
    grad = shifted(torch.randn(numel).to(dtype), 1)
    exact = float(grad.double().square().sum())
    kernels = [TWIN] if LIBRARY is None else [TWIN, *natives([1, 2, 3])]
    for kernel in kernels:
        assert kernel.squares(grad).total == pytest.approx(exact, rel=1e-12)
        assert kernel.squares(grad).first_bad is None
    assert len({kernel.squares(grad).total for kernel in kernels[1:]}) <= 1
    grad[numel // 2], grad[-1] = float("-inf"), float("nan")
    first = numel // 2 if numel > 1 else 0
    assert {kernel.squares(grad).first_bad for kernel in kernels} == {first}


def test_nothing_is_a_step_too() -> None:
    empty = torch.empty(0)
    for kernel in (TWIN, host_kernel()):
        kernel.step(adam_scalars(ADAMW.defaults, 1), empty, empty, (empty, empty), empty)
        assert kernel.squares(empty) == Squares(0.0, None)


@native
def test_several_threads_of_python_and_a_forked_child_share_the_kernels() -> None:
    kernel = natives([3])[0]
    tensors = sample(100_000, torch.bfloat16, torch.float32)
    expected = result(RULES["adamw"], TWIN, tensors, None)
    found: list[list[torch.Tensor]] = []
    callers = [
        threading.Thread(target=lambda: found.append(result(RULES["adamw"], kernel, tensors, None))) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 3
    for each in found:
        assert_same(each, expected)
    grad = tensors[0]
    total = kernel.squares(grad).total
    child = os.fork()
    if child == 0:  # no torch here: its own threads did not come along
        os._exit(0 if kernel.squares(grad).total == total else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_the_library_the_twin_runs_and_a_warning_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choose, "load_library", lambda: load_library(tmp_path / "none.so"))
    with pytest.warns(ZeroShardWarning, match="in PyTorch, about eight times slower .* no C\\+\\+ compiler was there"):
        kernel = host_kernel(threads=2)
    assert str(kernel).startswith("torch, 2 threads (no C++ compiler was there")


def test_a_file_that_is_no_library_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "torn.so").write_bytes(b"torn")
    library, reason = load_library(tmp_path / "torn.so")
    assert library is None
    assert "torn.so can't be loaded" in reason


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
        master, grad, first, second, out = {**good, **change}.values()
        with pytest.raises(UsageError, match=message):
            kernel.step(scalars, master, grad, (first, second), out)
