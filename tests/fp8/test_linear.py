"""Casts, products and layers in fp8, without an engine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.support.fp8_model import LAYERS, batch, build, loss_of, recipe
from tests.support.quantized import Coded
from zeroshard.engine.planning import _with_products
from zeroshard.errors import PlanError, UsageError
from zeroshard.fp8.block_casts import cast_blocks, cast_tiles, cast_tiles_both, transpose_blocks
from zeroshard.fp8.cast import (
    COLUMNS,
    FORMATS,
    VALUES,
    cast,
    cast_both,
    cast_columns,
    cast_rows,
    decode,
    scale_and_unscale,
)
from zeroshard.fp8.convert import choose, convert, described, restore
from zeroshard.fp8.linear import Fp8Linear
from zeroshard.fp8.products import _check_blocks, product, product_of_blocks
from zeroshard.fp8.recipe import BLOCK, Fp8, Products, Scaling, scaling_of
from zeroshard.fp8.speedup import speedup


def _matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_scale_is_the_largest_power_of_two_that_fits(kind: torch.dtype) -> None:
    largest = torch.tensor([1e-30, 0.1, 1.0, 1.75, 1.7500001, 1.99, 3.5, 448.0, 449.0, 1e30])
    scale, unscale = scale_and_unscale(largest, kind)
    limit = torch.finfo(kind).max
    assert bool((largest.double() * scale <= limit).all())
    inside = scale < 2.0**126
    assert bool((largest.double() * scale * 2 > limit)[inside].all())
    assert bool((torch.frexp(scale)[0] == 0.5).all())
    assert bool((scale * unscale == 1).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_the_sign_of_a_nan_does_not_matter(kind: torch.dtype) -> None:
    negative = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)  # a processor's sums make those
    assert bool(negative.isnan())
    assert torch.equal(scale_and_unscale(negative, kind)[0], scale_and_unscale(torch.tensor([math.nan]), kind)[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_value_is_rounded_to_its_neighbour_in_the_format(kind: torch.dtype) -> None:
    values = _matrix(9, 32)
    codes, unscale = cast(values, kind)
    error = (decode(codes, unscale, torch.float32) - values).abs()
    step = torch.finfo(kind).eps * values.abs() / 2 + torch.finfo(kind).smallest_normal * float(unscale)
    assert bool((error <= step).all())
    zeros, _ = cast(torch.zeros(4, 16), kind)
    assert bool((zeros.float() == 0).all())


def test_a_transposed_cast_has_the_same_codes_and_zeros_behind() -> None:
    codes, turned, unscale = cast_both(_matrix(21, 32), VALUES)
    assert turned.shape == (32, 2 * COLUMNS)
    assert torch.equal(turned.float()[:, :21], codes.float().t())
    assert bool((turned.float()[:, 21:] == 0).all())
    by_row, unscales = cast_columns(_matrix(21, 32), VALUES)
    rows, of_rows = cast_rows(_matrix(21, 32).t().contiguous(), VALUES)
    assert torch.equal(by_row.float()[:, :21], rows.float())
    assert torch.equal(unscales, of_rows)
    assert unscale.shape == (1,)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite_is_seen_in_the_product(bad: float, kind: torch.dtype) -> None:
    values = _matrix(4, 16)
    values[1, 2] = bad
    codes, unscale = cast(values, kind)
    result = product(codes, unscale, *cast(_matrix(16, 16), VALUES), torch.bfloat16)
    assert not bool(result[1].isfinite().any())
    assert bool(result[0].isfinite().all())


def test_each_tile_and_each_block_is_cast_with_its_own_scale() -> None:
    values = _matrix(130, 384) * torch.logspace(-3, 3, 384)
    (codes, unscale), (turned, of_turned) = cast_tiles_both(values, VALUES)
    for start in range(0, 384, BLOCK):
        expected, own = cast_rows(values[:, start : start + BLOCK].contiguous(), VALUES)
        assert torch.equal(codes[:, start : start + BLOCK].float(), expected.float())
        assert torch.equal(unscale[:, start // BLOCK], own[:, 0])
    assert unscale.stride() == (1, 130)
    straight, of_straight = cast_tiles(values.t()[:, :BLOCK].contiguous(), VALUES)
    assert turned.shape == (384, 2 * BLOCK)
    assert torch.equal(turned[:, :BLOCK].float(), straight.float())
    assert torch.equal(of_turned[:, :1], of_straight)
    assert bool((turned[:, 130:].float() == 0).all())
    weight = values[:BLOCK]
    blocks, scales = cast_blocks(weight, VALUES)
    for start in range(0, 384, BLOCK):
        expected, own = cast(weight[:, start : start + BLOCK].contiguous(), VALUES)
        assert torch.equal(blocks[:, start : start + BLOCK].float(), expected.float())
        assert torch.equal(scales[:, start // BLOCK], own)
    again, of_again = transpose_blocks((blocks, scales))
    assert torch.equal(again.float(), blocks.float().t())
    assert torch.equal(of_again, scales.t())


def test_products_by_block_are_those_of_the_decoded_values() -> None:
    a, b = _matrix(5, 384), _matrix(256, 384, seed=1) * torch.logspace(-6, 2, 384)
    left, right = cast_tiles(a, VALUES), cast_blocks(b, VALUES)
    for other in (right, cast_tiles(b, VALUES)):
        expected = decode(*left, torch.float32) @ decode(*other, torch.float32).t()
        found = product_of_blocks(*left, *other, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    by_block, by_tensor = (decode(*operand, torch.float32) - b for operand in (right, cast(b, VALUES)))
    assert by_block[:, :BLOCK].norm() < 0.5 * by_tensor[:, :BLOCK].norm()  # where values are small beside others


def test_a_compiled_graph_of_any_length_calls_the_product_by_block_as_it_is() -> None:
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    for backend in (look, "inductor"):
        compiled = torch.compile(product_of_blocks, fullgraph=True, dynamic=True, backend=backend)
        for rows in (64, 5, 32):
            left, right = cast_tiles(_matrix(rows, 256), VALUES), cast_blocks(_matrix(128, 256), VALUES)
            expected = product_of_blocks(*left, *right, torch.bfloat16)
            assert torch.equal(compiled(*left, *right, torch.bfloat16), expected)
    assert any("product_of_blocks" in name for name in seen)
    assert not any("scaled_mm" in name for name in seen)


def test_products_by_tensor_and_by_row_are_those_of_the_decoded_values() -> None:
    a, b = _matrix(5, 32), _matrix(7, 32, seed=1)
    for kind in (cast, cast_rows):
        (left, of_left), (right, of_right) = kind(a, VALUES), kind(b, VALUES)
        expected = decode(left, of_left, torch.float32) @ decode(right, of_right, torch.float32).t()
        found = product(left, of_left, right, of_right, torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", Scaling)
def test_a_model_in_fp8_is_close_to_the_one_in_bf16_and_is_plain_again_when_restored(scaling: Scaling) -> None:
    plain, model = build(Fp8(scaling=scaling)).bfloat16(), build(Fp8(scaling=scaling)).bfloat16()
    convert(model, Products(scaling, LAYERS))
    assert isinstance(model.get_submodule(LAYERS[0]), Fp8Linear)
    for one in (plain, model):
        loss_of(one, batch(0, 0, 0)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() < 0.15 * theirs.grad.norm()
    restore(model)
    assert torch.equal(model(batch(0, 0, 0)), plain(batch(0, 0, 0)))
    assert type(model.get_submodule(LAYERS[0])) is nn.Linear


def _pair() -> tuple[Fp8Linear, Fp8Linear]:
    first, second = nn.Linear(16, 32).bfloat16(), nn.Linear(16, 32).bfloat16()
    convert(nn.ModuleList([first, second]), Products(Scaling.TENSORWISE, ("0", "1")))
    assert isinstance(first, Fp8Linear)
    assert isinstance(second, Fp8Linear)
    return first, second


def test_one_cast_serves_the_layers_that_get_the_same_input() -> None:
    first, second = _pair()
    x = _matrix(4, 16).bfloat16()
    first(x)
    kept = first.last_input.cast(x, -1, both=True)
    second(x)
    assert first.last_input.cast(x, -2, both=True) is kept
    x.mul_(2)
    assert first.last_input.cast(x, -3, both=True) is not kept


def test_a_tensor_that_got_other_values_without_a_sign_is_cast_again() -> None:
    first, second = _pair()
    x = torch.zeros(4, 16, dtype=torch.float16)
    first.half(), second.half()
    before, same = first(x), second(x)
    x.numpy()[:] = _matrix(4, 16).numpy()  # as a collective does, it leaves the version as it is
    assert torch.equal(first(x), first(x.clone()))
    assert not torch.equal(first(x), before)
    assert torch.equal(second(x), second(x.clone()))
    assert not torch.equal(second(x), same)


@pytest.mark.parametrize("scaling", Scaling)
def test_second_derivatives_are_refused(scaling: Scaling) -> None:
    fp8 = Fp8(scaling=scaling)
    model = build(fp8).bfloat16()
    convert(model, Products(scaling, LAYERS))
    x = batch(0, 0, 0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    penalty = gradient.float().square().sum()
    with pytest.raises(UsageError, match=r"second derivatives through a layer.*fp8\.filter"):
        torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True, retain_graph=True)
    with pytest.raises(UsageError, match="second derivatives"):
        penalty.backward()


@pytest.mark.parametrize("scaling", Scaling)
def test_a_layer_alone_refuses_them_too(scaling: Scaling) -> None:
    """No gradient that it gets needs one itself."""
    layer = nn.Linear(128, 128).bfloat16()
    convert(nn.ModuleList([layer]), Products(scaling, ("0",)))
    x = torch.ones(4, 128, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="second derivatives"):
        gradient.square().sum().backward()


class _Mixed(nn.Module):
    """Layers of every kind that a choice meets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.ModuleDict({"wide": nn.Linear(4096, 4096), "odd": nn.Linear(24, 64)}) for _ in "ab"
        )
        self.attention = nn.MultiheadAttention(32, 2)
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.head.weight = self.table.weight


def test_the_layers_in_blocks_that_gain_take_part_and_the_list_says_why_others_do_not() -> None:
    with torch.device("meta"):
        model = _Mixed()
    found = {choice.name: choice for choice in choose(model, Fp8(tokens=65536))}
    assert {name for name, choice in found.items() if choice.taken} == {"inner.0.wide", "inner.1.wide"}
    assert "multiples of 16" in found["inner.0.odd"].why
    assert "tied" in found["head"].why
    assert "reads its weight" in found["attention.out_proj"].why
    assert any("2 linear layers of 4096 x 4096 take part" in line for line in described(list(found.values())))
    by_block = choose(model, Fp8(scaling=Scaling.BLOCKWISE, names=("inner",)))
    assert any("multiples of 128" in choice.why for choice in by_block)
    assert {choice.name for choice in by_block if choice.taken} == {"inner.0.wide", "inner.1.wide"}
    kept = choose(model, Fp8(), kept=("wide",))
    assert not any(choice.taken for choice in kept)


def test_names_choose_layers_and_wrong_ones_are_refused() -> None:
    with torch.device("meta"):
        model = _Mixed()
    chosen = choose(model, Fp8(names=("inner.1",)))
    assert [choice.name for choice in chosen if choice.taken] == ["inner.1.wide"]
    with pytest.raises(PlanError, match="has no"):
        choose(model, Fp8(names=("outer",)))
    with pytest.raises(PlanError, match="multiples of 16"):
        choose(model, Fp8(names=("inner.0.odd",)))


def test_layers_whose_weights_fp8_could_not_multiply_are_refused_by_name() -> None:
    layers = nn.ModuleDict({"low": nn.Linear(32, 32).bfloat16(), "wide": nn.Linear(32, 32)})
    layers["coded"] = nn.Linear(16, 16).bfloat16()
    layers["coded"].weight = nn.Parameter(Coded.of(torch.randn(16, 16)), requires_grad=False)
    assert all(choice.taken for choice in choose(layers, Fp8(names=("low", "wide"))) if choice.name != "coded")
    for name, said in (("wide", "float32"), ("coded", "Coded")):
        with pytest.raises(PlanError, match=f"layer '{name}' can't compute in fp8: its weight is .*{said}"):
            choose(layers, Fp8(names=("low", name)), converted=False)


def test_a_model_of_which_no_layer_takes_part_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    made = _with_products(recipe(3, fp8=Fp8()), build(), torch.device("cpu"))
    assert made.policy.products is None
    assert "no layer takes part; the model computes as without it (" in caplog.text
    assert "linear layers of 96 x 32 stay" in caplog.text


def test_a_gpu_or_torch_without_products_by_block_is_refused_by_name() -> None:
    _check_blocks("NVIDIA H100", (9, 0), "12.9")
    for name, capability, cuda in (("NVIDIA B200", (10, 0), "13.0"), ("NVIDIA H100", (9, 0), "12.8")):
        with pytest.raises(PlanError, match=rf"'blockwise' needs.*{name}.*{cuda}: use 'tensorwise'"):
            _check_blocks(name, capability, cuda)


def test_small_products_gain_nothing_and_large_ones_do() -> None:
    assert speedup(512, 512, 8192) < 1 < speedup(4096, 4096, 8192) < speedup(11008, 4096, 16384)
    assert speedup(2048, 2048, 512) < 1


def test_recipes_that_are_not_built_are_refused_by_name() -> None:
    for name in ("mxfp8", "nvfp4", "delayed"):
        with pytest.raises(PlanError, match=name):
            scaling_of(name)
    with pytest.raises(PlanError, match="no fp8 recipe 'fp9'"):
        scaling_of("fp9")


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("scaling", Scaling)
def test_evaluation_without_gradients_gives_what_training_computes(scaling: Scaling, without: type) -> None:
    model = build(Fp8(scaling=scaling)).bfloat16()
    convert(model, Products(scaling, LAYERS))
    trained = model(batch(0, 0, 0))
    with without():
        assert torch.equal(model(batch(0, 0, 0)), trained)
