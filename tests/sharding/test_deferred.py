"""A model built under `Init` takes no memory, and its values are the bits of the ordinary build."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.sharding.deferred_zoo import ZOO, Buffers, aliases, cast_at_the_end, linears, post_hoc
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.sharding.deferred.init import (
    Init,
    Materialized,
    fill_in_place,
    fingerprints,
    has_tape,
    is_deferred,
    materialize,
)
from zeroshard.sharding.deferred.tape import mark_of


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }


def assert_same_bits(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = state_of(model), state_of(reference)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), name
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=name)


def build_both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The ordinary and the deferred build of the same code with the same seed, generators compared after each line."""
    torch.manual_seed(1234)
    reference = build()
    after_reference = torch.get_rng_state()
    torch.manual_seed(1234)
    with Init(device="cpu"):
        deferred = build()
    assert torch.equal(torch.get_rng_state(), after_reference)
    materialize(deferred, "cpu", fill_in_place)
    assert torch.equal(torch.get_rng_state(), after_reference)
    return reference, deferred


@pytest.mark.parametrize("name", ZOO)
def test_a_deferred_build_has_the_bits_and_leaves_the_generator_of_an_ordinary_one(name: str) -> None:
    reference, deferred = build_both(ZOO[name])
    assert_same_bits(deferred, reference)
    assert [p.requires_grad for p in deferred.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert not has_tape(deferred)
    assert not is_deferred(deferred)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "Swin", "T5"])
def test_transformers_models_come_out_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    builders: dict[str, Callable[[], nn.Module]] = {
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_attention_heads=4)),
        "GPT2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
            )
        ),
        "Bert": lambda: transformers.BertModel(transformers.BertConfig(**small, num_attention_heads=4)),
        "Swin": lambda: transformers.SwinModel(
            transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2])
        ),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
    }
    reference, deferred = build_both(builders[name])
    assert_same_bits(deferred, reference)
    if name == "GPT2":
        assert deferred.get_parameter("lm_head.weight") is deferred.get_parameter("transformer.wte.weight")


def test_a_model_trains_after_its_parameters_were_filled_in_place() -> None:
    reference, deferred = build_both(post_hoc)
    for model in (reference, deferred):
        model(torch.tensor([1, 2, 3])).square().sum().backward()
    for ours, theirs in zip(deferred.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad if theirs.grad is not None else torch.zeros(0))


def test_ties_and_shared_storage_survive() -> None:
    _, model = build_both(aliases)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    top, bottom = model.get_parameter("top"), model.get_parameter("bottom")
    assert top.untyped_storage().data_ptr() == bottom.untyped_storage().data_ptr()
    assert torch.equal(torch.as_tensor(model.plain), torch.arange(5) * 2)


def test_parameters_stay_the_same_objects_and_keep_their_attributes() -> None:
    with Init(device="cpu"):
        model = nn.LSTM(3, 4)
        next(model.parameters()).tensor_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
    before = list(model.parameters())
    materialize(model, None, fill_in_place)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert vars(before[0]) == {"tensor_parallel": True}
    assert model(torch.zeros(1, 2, 3))[0].shape == (1, 2, 4)


def test_hooks_of_parameters_survive() -> None:
    seen: list[nn.Parameter] = []
    with Init(device="cpu"):
        model = nn.Linear(2, 1)
        halving = model.weight.register_hook(lambda gradient: gradient * 0.5)
        model.weight.register_post_accumulate_grad_hook(seen.append)
    materialize(model, None, fill_in_place)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
    assert seen == [model.weight]
    halving.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1.5, 1.5]]


def test_a_module_that_is_scripted_inside_of_init_is_refused_and_one_from_before_is_kept() -> None:
    before = torch.jit.script(nn.Linear(2, 2))
    with Init(device="cpu"):
        model = nn.Sequential(nn.Linear(2, 2), before)
    materialize(model, None, fill_in_place)
    assert model(torch.ones(1, 2)).isfinite().all()
    with Init(device="cpu"):
        scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"Linear was scripted \(torch.jit.script\) inside of Init"):
        materialize(scripted, None, fill_in_place)


def drop(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """A sink that keeps nothing."""


@pytest.mark.parametrize("build", [linears, post_hoc, cast_at_the_end])
def test_no_more_than_two_of_the_largest_tensor_are_alive_at_once(build: Callable[[int, int], nn.Module]) -> None:
    with Init(device="cpu"):
        model = build(64, 20)
    assert all(p.is_meta for p in model.parameters())
    largest = 64 * 64 * 4
    assert materialize(model, None, drop).peak_bytes <= 2 * largest


def test_nothing_of_a_draw_outlives_the_context() -> None:
    """On a GPU it would take as much as the largest parameter, until Python collects cycles."""
    gc.collect()
    gc.disable()
    try:
        with Init(device="cpu"):
            nn.Linear(512, 512)
        storages = [found for found in gc.get_objects() if type(found) is torch.UntypedStorage]
        assert all(found.device.type == "meta" or found.nbytes() < 512 * 512 for found in storages)
    finally:
        gc.enable()


def test_the_process_never_holds_the_model() -> None:
    """96 MiB of fp32, cast to bf16 in the constructor: building and streaming it adds less than a third of that."""
    program = """
import resource, sys, torch
from tests.sharding.deferred_zoo import cast_at_the_end
from tests.sharding.test_deferred import drop
from zeroshard.sharding.deferred.init import Init, fill_in_place, materialize
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with Init(device="cpu"): warm = cast_at_the_end(1024, 1)
materialize(warm, None, fill_in_place)
before = peak()
with Init(device="cpu"): model = cast_at_the_end(1024, 24)
recorded = peak() - before
materialize(model, None, drop)
print(recorded, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    recorded, streamed = map(float, done.stdout.split())
    assert recorded < 32
    assert streamed < 32


def test_each_tensor_is_handed_over_once_in_module_order_with_progress() -> None:
    with Init(device="cpu"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    seen: list[str] = []
    ticks: list[tuple[int, int]] = []
    done = materialize(
        model,
        "cpu",
        lambda name, tensor, value: seen.append(name),
        on_progress=lambda at, total: ticks.append((at, total)),
    )
    statistics = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert seen == ["0.weight", "0.bias", "1.weight", "1.bias", *statistics]
    assert ticks == [(i + 1, 7) for i in range(7)]
    assert done == Materialized(tensors=7, peak_bytes=24)


def test_one_rank_makes_only_the_tensors_that_it_wants_and_they_are_the_same() -> None:
    torch.manual_seed(7)
    reference = linears()
    torch.manual_seed(7)
    with Init(device="cpu"):
        model = linears()
    got: dict[str, torch.Tensor] = {}
    materialize(model, None, lambda n, t, v: got.update({n: v}), wanted=lambda name: name.startswith("2."))
    assert got.keys() == {"2.weight", "2.bias"}
    assert torch.equal(got["2.weight"], reference.get_parameter("2.weight"))
    assert has_tape(model)
    materialize(model, None, lambda n, t, v: got.update({n: v}))
    assert len(got) == 8
    assert torch.equal(got["3.weight"], reference.get_parameter("3.weight"))


def test_models_built_one_after_another_continue_the_same_random_numbers() -> None:
    torch.manual_seed(3)
    first, second, after = linears(), linears(), torch.rand(2)
    torch.manual_seed(3)
    with Init(device="cpu"):
        a = linears()
    with Init(device="cpu"):
        b = linears()
    assert torch.equal(torch.rand(2), after)
    for model, reference in ((b, second), (a, first)):
        materialize(model, None, fill_in_place)
        assert_same_bits(model, reference)


def test_submodels_of_several_inits_and_of_none_make_one_model() -> None:
    class Composite(nn.Module):
        def __init__(self, vision: nn.Module) -> None:
            super().__init__()
            self.vision = vision
            with Init(device="cpu"):
                self.text = linears()
            self.bridge = nn.Linear(3, 3)

    def build_composite(vision: nn.Module) -> nn.Module:
        return Composite(vision)

    torch.manual_seed(5)
    reference = build_composite(nn.Linear(4, 4))
    materialize(reference, None, fill_in_place)
    torch.manual_seed(5)
    outside = nn.Linear(4, 4)
    weight = outside.weight.detach().clone()
    with Init(device="cpu"):
        model = build_composite(outside)
        assert mark_of(torch.empty(1)) is not None
    assert torch.equal(outside.weight, weight)
    assert len(fingerprints(model)) == 1
    materialize(model, None, fill_in_place)
    assert_same_bits(model, reference)


def test_a_later_init_may_overwrite_what_an_earlier_one_made_but_not_read_it() -> None:
    with Init(device="cpu"):
        early = nn.Linear(3, 3)
    with Init(device="cpu"):
        nn.init.ones_(early.weight)
        with pytest.raises(UsageError, match=r"aten\.mul_\.Tensor.*inside one `with zeroshard\.Init"):
            early.bias.data.mul_(2)
    materialize(early, None, fill_in_place)
    assert torch.equal(early.weight, torch.ones(3, 3))


def test_init_with_a_dtype_is_a_build_under_that_default_dtype() -> None:
    torch.manual_seed(2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        reference = linears()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(2)
    with Init(dtype=torch.bfloat16, device="cpu"):
        model = linears()
    assert torch.get_default_dtype() is torch.float32
    materialize(model, None, fill_in_place)
    assert_same_bits(model, reference)


def test_everything_is_as_before_after_an_exception_in_a_constructor() -> None:
    def hooks() -> tuple[int, int]:
        module = torch.nn.modules.module
        return len(module._global_parameter_registration_hooks), len(module._global_module_registration_hooks)

    before = hooks()

    def build() -> None:
        with Init(device="cpu", dtype=torch.float64), Init(device="cpu", dtype=torch.bfloat16):
            nn.Linear(2, int(1 / 0))

    with pytest.raises(ZeroDivisionError):
        build()
    assert hooks() == before
    assert torch.get_default_dtype() is torch.float32
    assert not torch.empty(1).is_meta


def test_disabled_does_nothing() -> None:
    with Init(enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta


def test_the_tape_dies_with_the_model() -> None:
    with Init(device="cpu"):
        model = linears()
    mark = mark_of(next(model.parameters()))
    assert mark is not None
    tape = weakref.ref(mark.tape)
    del mark, model
    gc.collect()
    assert tape() is None


def test_ranks_with_different_seeds_have_different_fingerprints() -> None:
    def fingerprint(seed: int, build: Callable[[], nn.Module] = linears) -> list[str]:
        torch.manual_seed(seed)
        with Init(device="cpu"):
            return fingerprints(build())

    assert fingerprint(1) == fingerprint(1)
    assert fingerprint(1) != fingerprint(2)
    assert fingerprint(1) != fingerprint(1, post_hoc)


def test_what_cannot_be_deferred_is_refused_on_its_line_with_a_way_out() -> None:
    real = torch.zeros(3)
    with Init(device="cpu"):
        layer = nn.Linear(3, 3)
        with pytest.raises(UsageError, match=r"aten\.copy_\.default would write.*real tensor.*GatheredParameters"):
            real.copy_(layer.bias.data)
        with pytest.raises(UsageError, match=r"made outside of zeroshard\.Init"):
            OUTSIDE.mul_(2)
    materialize(layer, None, fill_in_place)


OUTSIDE = torch.empty(3, device="meta")


def test_values_read_by_python_are_the_real_ones() -> None:
    torch.manual_seed(0)
    expected = torch.randn(4, 4)
    torch.manual_seed(0)
    with Init(device="cpu"):
        weight = torch.randn(4, 4)
        assert weight.device == torch.device("cpu")
        assert not weight.is_meta
        assert weight[1, 2].item() == expected[1, 2].item()
        assert weight.tolist() == expected.tolist()
        assert bool(weight.sum() > 0) == bool(expected.sum() > 0)
        assert torch.allclose(weight, weight + 1e-9)
        assert weight[weight > 0].tolist() == expected[expected > 0].tolist()
        assert weight.nonzero().tolist() == expected.nonzero().tolist()
        assert weight[[0, 2]].tolist() == expected[[0, 2]].tolist()
        assert weight[:, np.array([1, 3])].tolist() == expected[:, [1, 3]].tolist()
        assert weight.new_tensor([1.5, 2.5]).tolist() == [1.5, 2.5]
        assert weight.numpy().tolist() == expected.tolist()
        assert weight.to("cpu") is weight
        with pytest.raises(ValueError, match="read-only"):
            weight.numpy()[0] = 1
    assert weight.is_meta


def test_changes_after_init_closed_are_an_error_and_not_lost() -> None:
    def built() -> nn.Module:
        with Init(device="cpu"):
            return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    touched = built()
    nn.init.zeros_(touched.get_parameter("1.weight"))
    cast = built().to(torch.bfloat16)
    mixed = nn.Sequential(built(), copy.deepcopy(built()))
    for model, name in ((touched, r"1\.weight"), (cast, r"0\.weight.*and 1 more"), (mixed, r"1\.0\.weight")):
        with pytest.raises(UsageError, match=f"^{name}.*Init had closed|^{name}.*changed after"):
            materialize(model, None, drop)


def test_a_borrowed_checkpoint_that_changes_before_sharding_is_an_error() -> None:
    checkpoint = torch.rand(600, 600)
    with Init(device="cpu"):
        layer = nn.Linear(600, 600)
        layer.weight.data.copy_(checkpoint)
    checkpoint.zero_()
    with pytest.raises(UsageError, match="was changed afterwards"):
        materialize(layer, None, drop)


def test_a_plain_meta_model_is_filled_by_reset_parameters_with_a_warning() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Embedding(4, 3, padding_idx=0))
    assert is_deferred(model)
    assert not has_tape(model)
    torch.manual_seed(0)
    with pytest.warns(ZeroShardWarning, match="reset_parameters"):
        materialize(model, None, fill_in_place)
    torch.manual_seed(0)
    assert_same_bits(model, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Embedding(4, 3, padding_idx=0)))


def test_a_plain_meta_model_that_cannot_reset_is_refused_by_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Buffers())
    with pytest.raises(UsageError, match=r"1 \(Buffers\) can't fill"):
        materialize(model, None, drop)


@pytest.mark.parametrize(
    "arguments",
    [
        {"module": nn.Linear(1, 1)},
        {"data_parallel_group": "group"},
        {"remote_device": "tape"},
        {"pin_memory": True},
        {"mpu": "mpu"},
        {"zero_quantized_weights": True},
        {"param_swapper": "swapper"},
        {"dtype": torch.int8},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_mean_nothing_here_are_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=rf"zeroshard\.Init\({next(iter(arguments))}="):
        Init(**arguments)  # pyright: ignore[reportArgumentType]


def test_inert_arguments_and_any_config_are_taken() -> None:
    for remote in (None, "none", "cpu", "nvme"):
        Init(None, None, False, remote, False, {"bf16": {"enabled": True}}, "path.json", True, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ZOO)
def test_a_build_for_the_gpu_has_the_bits_of_a_build_on_the_gpu(name: str) -> None:
    torch.manual_seed(1234)
    with torch.device("cuda"):
        reference = ZOO[name]()
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.manual_seed(1234)
    with Init():
        deferred = ZOO[name]()
    assert all(p.is_meta for p in deferred.parameters())
    materialize(deferred, None, fill_in_place)
    assert torch.equal(torch.cuda.get_rng_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert_same_bits(deferred, reference)
