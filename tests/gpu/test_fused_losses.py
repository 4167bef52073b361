"""On a GPU: Liger's kernels, which read `lm_head.weight` outside of the head's forward, train at every stage as in
plain torch on the same GPU.

Run by `pytest tests/gpu` on a machine with GPUs where transformers and liger-kernel are installed. The kernels add with
atomics here and there, so results are close, not equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compat.bits import Trainable, losses_of_both
from tests.gpu.test_training import BACKEND, GPUS, on_gpu
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
need("transformers", "liger_kernel")


def _cases() -> dict[str, Trainable]:
    from tests.compat import fused, fused_libraries

    cases: dict[str, Trainable] = {}
    for tied in (False, True):
        kinds: dict[str, Trainable] = {
            "Liger's head": fused_libraries.liger(tied),
            "all of Liger": fused_libraries.all_of_liger(tied),
            **fused_libraries.liger_preferences(tied),
            **{name: fused.FusedHead(loss, tied) for name, loss in fused.HEAD_LOSSES.items()},
        }
        cases |= {f"{name}, {tied=}": case for name, case in kinds.items()}
    return cases


def _train(rank: int, world: int) -> dict[str, Any]:
    on_gpu(rank)
    return {
        f"{name}, stage {stage}": losses_of_both(case, stage, rank, world, torch.device("cuda", rank))
        for name, case in _cases().items()
        for stage in range(4)
    }


@pytest.mark.parametrize("world", sorted({1, GPUS}))
def test_fused_losses_train_on_gpus_as_in_plain_torch(world: int) -> None:
    for found in run_ranks(world, _train, backend=BACKEND, timeout=500):
        assert len(found) == 4 * len(_cases())
        for name, (ours, plain) in found.items():
            assert ours == pytest.approx(plain, rel=1e-5), name
            assert len(set(ours)) > 1, name
