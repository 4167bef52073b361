"""The choice of experts: Switch's and GShard's rules, and who is left out where an expert takes only so many."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from zeroshard.experts.gating import Choice, capacity_of, choose


def _logits(tokens: int = 12, experts: int = 4) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))


def _taken(choice: Choice, experts: int) -> list[int]:
    return torch.bincount(choice.experts[choice.kept], minlength=experts).tolist()


def test_the_weight_of_one_expert_is_its_probability_and_those_of_several_add_up_to_one() -> None:
    logits = _logits()
    probabilities = F.softmax(logits, dim=1)
    one = choose(logits, 1, None)
    assert torch.equal(one.experts[:, 0], probabilities.argmax(dim=1))
    assert torch.equal(one.weights[:, 0], probabilities.max(dim=1).values)
    for k in (2, 3):
        several = choose(logits, k, None)
        assert torch.allclose(several.weights.sum(dim=1), torch.ones(12))
        assert torch.equal(several.experts, probabilities.topk(k, dim=1).indices)
        assert int(several.counts.sum()) == 12 * k


def test_the_auxiliary_loss_is_one_where_all_is_even_and_the_number_of_experts_where_one_has_all() -> None:
    even = 50.0 * torch.eye(4).repeat(3, 1)
    assert abs(float(choose(even, 1, None).auxiliary) - 1) < 1e-5
    assert abs(float(choose(even[:, [0, 0, 0, 0]] + torch.tensor([50.0, 0, 0, 0]), 1, None).auxiliary) - 4) < 1e-5
    logits = _logits()
    share = F.one_hot(logits.argmax(dim=1), 4).float().mean(dim=0)
    wanted = 4 * (F.softmax(logits, dim=1).mean(dim=0) * share).sum()
    assert torch.allclose(choose(logits, 2, None).auxiliary, wanted)


def test_an_expert_takes_the_first_tokens_and_second_choices_come_after_all_first_ones() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0], [3.0, 0.0, 2.0], [2.0, 3.0, 0.0], [2.0, 0.0, 3.0]])
    choice = choose(logits, 2, 2)
    assert choice.kept.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert torch.equal(choice.weights[2], torch.tensor([1.0, 0.0]))
    first = choose(logits[:, :1].expand(4, 3) + torch.tensor([1.0, 0.0, 0.0]), 1, 3)
    assert first.kept[:, 0].tolist() == [True, True, True, False]
    assert first.counts.tolist() == [4, 0, 0]


def test_with_more_choices_the_most_probable_ones_stay() -> None:
    logits = _logits(tokens=8, experts=3)
    choice = choose(logits, 3, 5)
    probabilities = F.softmax(logits, dim=1)
    for expert in range(3):
        kept = choice.kept & (choice.experts == expert)
        most = probabilities[:, expert].topk(5).indices
        assert torch.equal(kept.any(dim=1).nonzero().flatten(), most.sort().values)


def test_tokens_that_are_in_no_sequence_go_nowhere_and_take_no_place() -> None:
    same = torch.tensor([2.0, 0.0]).repeat(6, 1)
    choice = choose(same, 1, 2, used=torch.tensor([0, 0, 0, 1, 1, 1]))
    assert choice.kept[:, 0].tolist() == [False, False, False, True, True, False]
    assert choice.counts.tolist() == [3, 0]
    torch.manual_seed(0)
    drawn = [choose(same, 1, 2, at_random=True).kept[:, 0] for _ in range(20)]
    assert all(int(kept.sum()) == 2 for kept in drawn)
    assert len({tuple(kept.tolist()) for kept in drawn}) > 5


def test_the_capacity_is_a_share_of_all_choices_and_no_less_than_the_least() -> None:
    assert capacity_of(10, 4, 1, 1.0, 0) == 3
    assert capacity_of(10, 4, 2, 1.25, 0) == 7
    assert capacity_of(10, 4, 1, 1.0, 4) == 4
    assert _taken(choose(_logits(), 2, None), 4) == choose(_logits(), 2, None).counts.tolist()
