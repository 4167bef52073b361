"""A transformers model on parts of sequences trains as one process does on whole ones."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.installed import need
from tests.support.parallel_model import Step, assert_close
from zeroshard.errors import PlanError, UsageError
from zeroshard.parallel.divided_attention import divide_attention
from zeroshard.parallel.sequence_loader import part_of_batch
from zeroshard.parallel.sequence_loss import mean_over_sequence

need("transformers")

WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
CLIP, STEPS, SAMPLES = 0.5, 3, 2
ADAMW: dict[str, Any] = {"lr": 1e-3, "eps": 1e-6}  # a smaller epsilon inflates the rounding of gradients near nothing


@dataclass(frozen=True)
class Case:
    """A model, the sequences that it is given, and how ranks are divided."""

    parts: int
    stage: int
    kind: str = "Llama"
    tokens: int = 16
    batch: str = "plain"
    key_heads: int = 2
    window: int | None = None
    checkpointed: bool = False


PACKED, PADDED = "packed", "padded"
TWO_RANKS = [
    Case(2, 3),
    Case(2, 0, batch=PACKED),
    Case(2, 1, kind="Mistral", window=4, batch=PACKED),
    Case(2, 2, kind="Qwen3", tokens=15, batch=PADDED, key_heads=1),
    Case(2, 3, kind="Mistral", window=4, batch=PACKED, tokens=17, checkpointed=True),
    Case(2, 1, tokens=1 + 2 * 7),
]
FOUR_RANKS = [
    Case(parts, stage, kind=kind, tokens=tokens, batch=batch, checkpointed=stage == 3)
    for parts, stage, kind, (tokens, batch) in itertools.product(
        (2, 4), range(4), ("Llama", "Qwen3"), ((16, "plain"), (3, PADDED), (18, PACKED))
    )
]


def _model(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    more = {} if case.window is None else {"sliding_window": case.window}
    config = getattr(transformers, f"{case.kind}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=case.key_heads,
        head_dim=8,
        use_cache=False,  # with a cache transformers takes no notice of packed documents
        **more,
    )
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config)
    if case.checkpointed:
        model.gradient_checkpointing_enable()
    return model


def _batch(case: Case, step: int, data: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data)
    ids = torch.randint(0, 64, (SAMPLES, case.tokens), generator=generator)
    labels = ids.clone()
    labels[:, : min(3, case.tokens // 2)] = -100  # the ranks have other numbers of labels
    batch = {"input_ids": ids, "labels": labels}
    if case.batch == PACKED:
        first = torch.arange(5), torch.arange(case.tokens - 5)
        second = torch.arange(case.tokens - 7), torch.arange(7)
        batch["position_ids"] = torch.stack([torch.cat(first), torch.cat(second)])
    if case.batch == PADDED:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, case.tokens - 1 :] = 0
        labels[1, case.tokens - 1 :] = -100
    return batch


def _in_one_process(case: Case, data: int) -> tuple[list[Step], dict[str, torch.Tensor]]:
    model = _model(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    found: list[Step] = []
    for step in range(STEPS):
        loss = torch.stack([model(**_batch(case, step, number)).loss for number in range(data)]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found, {name: value.detach().clone() for name, value in model.state_dict().items()}


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        **more,
    }


def _on_ranks(case: Case, rank: int, world: int) -> tuple[list[Step], dict[str, torch.Tensor]]:
    model = _model(case)
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config=_config(case.stage, sequence_parallel_size=case.parts),
    )
    assert engine.train_batch_size() == SAMPLES * world // case.parts
    group = model_group()
    found: list[Step] = []
    for step in range(STEPS):
        part = part_of_batch(_batch(case, step, rank // case.parts), group.rank(), case.parts)
        labels = part["shift_labels"]
        loss = mean_over_sequence(engine(**part, labels=labels).loss, labels, group)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        norm = engine.get_global_grad_norm()
        assert norm is not None
        found.append((float(mean) / world, norm))
    state = zeroshard.full_state_dict(engine.module)
    engine.destroy()
    return found, state


def model_group() -> dist.ProcessGroup:
    """The ranks of this rank's sequence, as libraries ask for them."""
    from deepspeed.utils import groups

    return groups._get_sequence_parallel_group()


def _trains(rank: int, world: int, cases: list[Case]) -> None:
    for case in cases:
        assert_close(_on_ranks(case, rank, world), _in_one_process(case, world // case.parts), case)


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
@pytest.mark.parametrize("parts", [2, 4])
def test_two_sequences_and_one_over_four_ranks_do_so_too(parts: int) -> None:
    run_ranks(4, _trains, [case for case in FOUR_RANKS if case.parts == parts], timeout=600)


def _beside_tensor_parallelism(rank: int, world: int) -> None:
    for stage in (1, 3):
        case = Case(2, stage, batch=PACKED)
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_shard", "sp", "tp"))
        optimizer = {"type": "AdamW", "params": {**ADAMW, "weight_decay": 0.01}}
        sizes = {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}
        engine, *_ = zeroshard.initialize(
            model=_model(case), mesh_param=mesh, config=_config(stage, optimizer=optimizer, **sizes)
        )
        group = model_group()
        found: list[Step] = []
        for step in range(STEPS):
            part = part_of_batch(_batch(case, step, 0), group.rank(), 2)
            labels = part["shift_labels"]
            loss = mean_over_sequence(engine(**part, labels=labels).loss, labels, group)
            engine.backward(loss)
            engine.step()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            found.append((float(loss.detach()), norm))
        assert_close((found, zeroshard.full_state_dict(engine.module)), _in_one_process(case, 1), case)
        engine.destroy()


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
def test_sequences_are_divided_beside_tensor_parallelism_on_a_mesh_of_both() -> None:
    run_ranks(4, _beside_tensor_parallelism, timeout=300)


class Two(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def _claims(model: nn.Module, error: str, **options: Any) -> None:
    """`initialize` refuses the model in a sentence."""
    more = options.pop("more", {})
    with pytest.raises(PlanError, match=error):
        zeroshard.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=_config(1, **more), **options
        )


def _refuses_on_ranks(rank: int, world: int) -> None:
    import transformers
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups

    assert groups._get_sequence_parallel_world_size() == 1
    with pytest.raises(UsageError, match="no sequences are divided over ranks"):
        groups._get_sequence_parallel_group()
    tiny = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    odd = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=3, **tiny))
    two = {"sequence_parallel_size": 2}
    _claims(odd, "LlamaForCausalLM over 2 ranks: the model has 3 heads of attention, which 2 ranks", more=two)
    _claims(
        _model(Case(2, 1)), "sequence_parallel_size 3 does not divide the 2 ranks", more={"sequence_parallel_size": 3}
    )
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "sp"))
    _claims(Two(), "divided over 2 ranks, but the mesh .* has no axis 'sp' of so many", more=two, mesh_param=mesh)
    mixed = transformers.Qwen3NextConfig(num_attention_heads=4, layer_types=["linear_attention"], **tiny)
    encoder = transformers.T5Config(d_model=8, num_heads=4)
    for config, error in ((mixed, "layers of type linear_attention"), (encoder, "encoder-decoder")):
        empty = nn.Module()
        empty.config = config  # pyright: ignore[reportArgumentType]
        with pytest.raises(PlanError, match=error):
            UlyssesSPAttentionHF.register_with_transformers(empty, "sdpa", 2, 1)
    with pytest.raises(UsageError, match=r"sequences of 15 tokens don't divide over 2 ranks"):
        UlyssesSPAttentionHF.register_with_transformers(_model(Case(2, 1)), "sdpa", 2, 1, 15, False)
    with pytest.raises(PlanError, match=r"1: sequences of this process are divided over 2 ranks already"):
        UlyssesSPAttentionHF.register_with_transformers(_model(Case(2, 1)), "sdpa", 1, 1)
    mpu = UlyssesSPAttentionHF.register_with_transformers(_model(Case(2, 1)), "sdpa", 2, 1)
    _claims(
        _model(Case(2, 1)),
        "two ways: sequence_parallel_size 4, mpu 2 ranks",
        more={"sequence_parallel_size": 4},
        mpu=mpu,
    )
    _claims(Two(), "Two is no transformers model: let its attention exchange itself", mpu=mpu)
    for core in ("none_such", "eager"):
        mpu = UlyssesSPAttentionHF.register_with_transformers(_model(Case(2, 1)), core, 2, 1)
        _claims(_model(Case(2, 1)), f"LlamaForCausalLM: core attention '{core}'", mpu=mpu)


def _adapts(rank: int, world: int) -> None:
    """LoRA, evaluation of whole sequences, other models of the process, and what a forward refuses."""
    import deepspeed
    import peft
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    case = Case(2, 3, batch=PACKED)
    plain, inner = _model(case), _model(case)
    reference = type(inner)(inner.config)  # with the same config object
    reference.load_state_dict(plain.state_dict())
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(inner, lora)
    torch.manual_seed(1)
    whole = peft.get_peft_model(plain, lora)
    mpu = UlyssesSPAttentionHF.register_with_transformers(adapted, None, 2, SAMPLES, disable_in_eval=True)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=adapted, optimizer=torch.optim.AdamW(trained, **ADAMW), config=_config(3), mpu=mpu
    )
    optimizer = torch.optim.AdamW([one for one in whole.parameters() if one.requires_grad], **ADAMW)
    for step in range(2):
        batch = _batch(case, step, 0)
        wanted = whole(**batch).loss
        wanted.backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        part = part_of_batch(batch, rank, 2)
        assert set(part) == {"input_ids", "position_ids", "shift_labels"}
        loss = engine(**part, labels=part["shift_labels"]).loss
        loss = mean_over_sequence(loss, part["shift_labels"], mpu.get_sequence_parallel_group())
        engine.backward(loss)
        engine.step()
        assert abs(float(loss) - float(wanted)) < 1e-6
        assert abs(engine.get_global_grad_norm() - norm) < 1e-6
    batch = _batch(case, 9, rank)  # each rank one of its own
    engine.eval(), whole.eval(), reference.eval()
    assert torch.allclose(engine(**batch).logits, whole(**batch).logits, atol=1e-6)
    untouched = _model(case).eval()
    assert torch.allclose(reference.train()(**batch).logits, untouched(**batch).logits, atol=1e-6)
    engine.train()
    same = _batch(case, 9, 0)["input_ids"]
    divide_attention(untouched, mpu.get_sequence_parallel_group())
    for model in (engine, untouched):
        with pytest.raises(UsageError, match=r"all 2 ranks of a sequence were given the same .*disable_in_eval=True"):
            model(input_ids=same)
    assert untouched(input_ids=torch.ones_like(same)).logits.isfinite().all()  # any part of it is like any other
    lengths = {0: 8, 1: 6}
    with pytest.raises(UsageError, match=r"rank 0: 2 x 8; rank 1: 2 x 6"):
        engine(input_ids=batch["input_ids"][:, : lengths[rank]])
    with pytest.raises(
        UsageError, match=r"attention_mask is \(2, 16\), but this rank's part of the sequence is \(2, 8\)"
    ):
        engine(input_ids=batch["input_ids"][:, :8], attention_mask=torch.ones(2, 16))
    from transformers import DynamicCache

    with pytest.raises(UsageError, match="a cache of keys was given"):
        engine(input_ids=batch["input_ids"][:, :8], past_key_values=DynamicCache())


def _holds(rank: int, world: int) -> None:
    _refuses_on_ranks(rank, world)
    _trains(rank, world, TWO_RANKS)
    _adapts(rank, world)


def test_parts_train_as_whole_sequences_do_in_one_process_and_what_cannot_be_is_refused() -> None:
    """In one set of ranks, since each of them imports transformers."""
    run_ranks(2, _holds, timeout=300)
