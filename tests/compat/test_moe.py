"""Scripts with DeepSpeed's MoE layer: experts over ranks, with ZeRO, train as one process does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import zeroshard
from tests.support.distributed import run_ranks
from tests.support.parallel_model import assert_same, whole_state
from zeroshard.errors import PlanError, UsageError

deepspeed = pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
WHOLE_MATRIX = os.environ.get("ZEROSHARD_ALL_MESHES") == "1"
WIDTH = 8
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}


class Script(nn.Module):
    """A model as such scripts have it, and what it is trained by."""

    def __init__(self, ep_size: int, **options: Any) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, drop_tokens=False, use_rts=False, **options)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mixed, auxiliary, counts = self.moe(self.first(tokens))
        assert int(counts.sum()) == tokens[..., 0].numel() * self.moe.deepspeed_moe.gate.k
        return F.cross_entropy(self.last(mixed).flatten(0, 1), labels.flatten()) + 0.1 * auxiliary


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    assert [group.get("moe", False) for group in groups] == [False, True]
    assert all(is_moe_param(parameter) for parameter in groups[1]["params"])
    # The copy beside the experts makes what they make at first: of the gradient of the shares rounding alone is left,
    # which a smaller eps would follow.
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 5, WIDTH, generator=generator), torch.randint(0, 3, (2, 5), generator=generator)


def _trained(rank: int, world: int, ep_size: int, options: dict[str, Any], stages: list[int]) -> None:
    for stage in stages:
        plain = Script(1, **options)
        optimizer = _optimizer(plain)
        model = Script(ep_size, **options)
        assert isinstance(next(model.moe.deepspeed_moe.experts.parameters()), DTensor)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_optimizer(model), config={**CONFIG, "zero_optimization": {"stage": stage}}
        )
        for step in range(3):
            wanted = torch.stack([plain(*_batch(step, other)) for other in range(world)]).mean()
            wanted.backward()
            norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            found = engine(*_batch(step, rank))
            engine.backward(found)
            engine.step()
            mean = found.detach().clone()
            dist.all_reduce(mean)
            assert abs(float(mean) / world - float(wanted.detach())) < 1e-6, (stage, step)
            assert abs(float(engine.get_global_grad_norm()) - norm) < 1e-6, (stage, step)
        whole = plain.state_dict()
        for name, value in zeroshard.full_state_dict(engine.module).items():
            assert float((value - whole[name]).abs().max()) < 1e-6, (stage, name)
        engine.destroy()


CASES: list[dict[str, Any]] = [{"k": 1}, {"k": 2, "top2_2nd_expert_sampling": False, "use_residual": True}]


def test_a_script_with_experts_trains_as_one_process_does() -> None:
    run_ranks(2, _trained, 2, CASES[1], [1, 3])


@pytest.mark.skipif(not WHOLE_MATRIX, reason="set ZEROSHARD_ALL_MESHES=1")
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("number", range(2))
def test_a_script_with_experts_trains_at_all_stages_on_four_ranks(ep_size: int, number: int) -> None:
    run_ranks(4, _trained, ep_size, CASES[number], [0, 1, 2, 3], timeout=600)


def _moved(rank: int, world: int, folder: str) -> None:
    saved: dict[str, torch.Tensor] = {}
    for ep_size, stage in ((2, 3), (1, 1), (2, 2)):
        model = Script(ep_size, k=1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_optimizer(model), config={**CONFIG, "zero_optimization": {"stage": stage}}
        )
        if not saved:
            engine.backward(engine(*_batch(0, rank)))
            engine.step()
            engine.save_checkpoint(folder)
            saved = whole_state(engine.module)
        else:
            engine.load_checkpoint(folder)
            assert_same(whole_state(engine.module), saved, f"ep_size 2, stage 3 into {ep_size}, {stage}")
        engine.destroy()


def test_a_checkpoint_loads_at_any_ep_size(tmp_path: Path) -> None:
    run_ranks(2, _moved, str(tmp_path))


def _asked(rank: int, world: int) -> None:
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import has_moe_layers, is_moe_param, is_moe_param_group
    from deepspeed.utils import groups

    model = Script(2, k=1, noisy_gate_policy="RSample")
    assert has_moe_layers(model) == (True, 4)
    assert model.moe.num_local_experts == 2
    assert sum(is_moe_param(parameter) for parameter in model.parameters()) == 4
    name = model.moe.expert_group_name
    assert groups._get_expert_parallel_world_size(name) == 2
    assert groups._get_expert_parallel_rank(name) == rank
    assert groups._get_expert_data_parallel_world_size(name) == 1
    assert is_moe_param_group({"moe": True})
    with pytest.raises(UsageError, match=r"MoE\(num_experts=4, ep_size=3\)"):
        Script(3)
    with pytest.raises(PlanError, match="ep_size 4 does not divide the 2 ranks that run"):
        Script(4)
    with pytest.raises(UsageError, match="enable_expert_tensor_parallelism"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, enable_expert_tensor_parallelism=True)
    with pytest.raises(UsageError, match="noisy_gate_policy 'X'"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, noisy_gate_policy="X")
    dropped = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, k=1, capacity_factor=0.25, min_capacity=1)
    tokens = torch.randn(8, WIDTH, requires_grad=True)
    output, _, counts = dropped(tokens)
    assert int(counts.sum()) == 8
    assert int((output.abs().sum(dim=1) > 0).sum()) <= 2
    output.sum().backward()


def test_what_scripts_ask_of_experts_is_there_and_what_cannot_be_is_refused() -> None:
    run_ranks(2, _asked)
