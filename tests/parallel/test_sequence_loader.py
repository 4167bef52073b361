"""Each rank of a sequence gets its part of the batches that its ranks read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.support.distributed import run_ranks
from zeroshard.errors import UsageError
from zeroshard.parallel.distributed_attention import DistributedAttention
from zeroshard.parallel.sequence_axis import divide_sequences
from zeroshard.parallel.sequence_loader import SequenceLoader, part_of_batch


def _collated(rows: list[Any]) -> dict[str, Any]:
    ids = torch.stack(rows)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "name": "text",
        "lengths": torch.tensor([len(row) for row in rows]),
    }


def _reads(rank: int, world: int) -> None:
    group = divide_sequences(2, "test").group
    place = rank % 2
    ends = torch.utils.data.DataLoader(
        torch.arange(2 + rank).add(10 * rank).view(-1, 1).expand(-1, 6), collate_fn=_collated
    )
    loader = SequenceLoader(ends, place, group, "cpu")
    assert loader.timeout == 0
    read = list(loader)
    first = rank // 2 * 2
    rows = [value for step in range(3 + first) for value in _row(first, step) + _row(first + 1, step)]
    assert [int(batch["input_ids"][0, 0]) for batch in read] == rows
    for batch in read:
        assert batch["input_ids"].shape == (1, 3)
        assert batch["position_ids"].tolist() == [[3 * place, 3 * place + 1, 3 * place + 2]]
        number = int(batch["input_ids"][0, 0])
        assert batch["shift_labels"].tolist() == [[number, number, number if place == 0 else -100]]
        assert "labels" not in batch
        assert batch["name"] == "text"
        assert batch["lengths"].tolist() == [6]


def _row(of: int, step: int) -> list[int]:
    return [10 * of + step] if step < 2 + of else []


class End(torch.utils.data.DataLoader[Any]):
    """As accelerate's loaders, it knows with the last batch that it is the last."""

    end_of_dataloader = False

    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        for number, batch in enumerate(batches):
            self.end_of_dataloader = number == len(batches) - 1
            yield batch


def _ends(rank: int, world: int) -> None:
    group = divide_sequences(2, "test").group
    inner = End(torch.zeros(2, 4, dtype=torch.int64), collate_fn=_collated)  # type: ignore[arg-type]
    loader = SequenceLoader(inner, rank, group, "cpu")
    assert [inner.end_of_dataloader for _ in loader] == [False, False, False, True]
    assert len(loader) == 4
    parts = list(loader)
    again: Any = torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )
    assert len(again) == 4
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(again, parts, strict=True))
    with pytest.raises(UsageError, match="is a mapping with input_ids, not a Tensor"):
        next(iter(SequenceLoader([torch.zeros(2)], rank, group, None)))
    with pytest.raises(UsageError, match=r"can't send each other \(Object of type object"):
        next(iter(SequenceLoader([{"input_ids": torch.zeros(1, 2), "more": object()}], rank, group, None)))
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "optimizer": {"type": "AdamW"}}
    data: Any = torch.arange(16).view(8, 2)
    engine, _, own, _ = zeroshard.initialize(
        model=nn.Linear(2, 2), config=config, training_data=data, collate_fn=_collated
    )
    assert own is not None
    assert engine.train_batch_size() == 2
    adapted = SequenceLoader(own, rank, group, None)
    assert len(adapted) == len(own) == 4  # the ranks of a sequence read the same already
    assert sorted(int(row[0]) for batch in adapted for row in batch["input_ids"]) == list(range(rank, 16, 2))


def test_batches_of_all_ranks_of_a_sequence_are_cut_and_given_in_turn() -> None:
    run_ranks(4, _reads)


def test_the_last_part_is_the_end_and_loaders_of_the_engine_are_cut_as_they_are() -> None:
    run_ranks(2, _ends)


@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_lengths_that_ranks_do_not_divide_are_padded(tokens: int) -> None:
    ids = torch.arange(2 * tokens).view(2, tokens)
    parts = [part_of_batch({"input_ids": ids, "labels": ids}, rank, 4) for rank in range(4)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    length = math.ceil(tokens / 4) * 4
    assert all(part["input_ids"].shape == (2, length // 4) for part in parts)
    assert torch.equal(whole["input_ids"][:, :tokens], ids)
    assert torch.equal(whole["position_ids"][0], torch.arange(length))
    assert torch.equal(whole["shift_labels"][:, : tokens - 1], ids[:, 1:])
    assert (whole["shift_labels"][:, tokens - 1 :] == -100).all()
    assert ("attention_mask" in whole) == (length > tokens)
    if length > tokens:
        assert whole["attention_mask"].sum(1).tolist() == [tokens, tokens]


def test_padding_of_a_packed_batch_is_a_document_of_its_own() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    batch = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "position_ids": positions, "images": torch.zeros(3)}
    parts = [part_of_batch(batch, rank, 4) for rank in range(4)]
    assert torch.cat([part["position_ids"] for part in parts], dim=1).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert "attention_mask" not in parts[0]
    assert parts[3]["images"].shape == (3,)
    with pytest.raises(UsageError, match="a mask for each pair of tokens can't be cut"):
        part_of_batch({**batch, "attention_mask": torch.ones(1, 1, 5, 5)}, 0, 1)
    with pytest.raises(UsageError, match=r"needs input_ids of shape \(samples, tokens\); it has \['pixels'\]"):
        part_of_batch({"pixels": torch.ones(1)}, 0, 2)


class Causal(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3)


def _attends(rank: int, world: int) -> None:
    group = divide_sequences(4, "test").group
    generator = torch.Generator().manual_seed(0)
    for heads, key_heads in ((4, 4), (8, 2), (12, 6), (12, 4)):
        shapes = [(8, 2, count, 6) for count in (heads, key_heads, key_heads)]
        whole = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
        wanted = Causal()(*whole, scale=0.3)
        wanted.square().sum().backward()
        window = slice(2 * rank, 2 * rank + 2)
        parts = [tensor.detach()[window].requires_grad_() for tensor in whole]
        found = DistributedAttention(Causal(), group)(*parts, 1, scale=0.3)
        assert torch.allclose(found, wanted[window], atol=1e-6)
        found.square().sum().backward()
        for part, tensor in zip(parts, whole, strict=True):
            assert part.grad is not None
            assert tensor.grad is not None
            assert torch.allclose(part.grad, tensor.grad[window], atol=1e-5), (heads, key_heads)
    three = torch.zeros(2, 1, 3, 4)
    with pytest.raises(
        zeroshard.errors.PlanError, match=r"3 heads of attention, which 4 ranks of a sequence do not divide"
    ):
        DistributedAttention(Causal(), group)(three, three, three)
    dist.barrier()


def test_an_attention_of_ones_own_exchanges_heads_for_tokens() -> None:
    run_ranks(4, _attends)
