"""transformers' from_pretrained under ZeRO-3: rank 0 reads, and no other rank holds more than its share and one block.

`ZEROSHARD_HF_TESTS=1`. The peak of the process's memory is measured, over what the same call of a small model left.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.compat import tiny
from tests.support.distributed import run_ranks
from tests.support.installed import need

pytest.importorskip("deepspeed", reason="zeroshard-deepspeed (compat/deepspeed) is not installed")
need("transformers")
pytestmark = [
    pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1"),
    pytest.mark.skipif(
        sys.platform != "linux" or not os.access("/proc/self/clear_refs", os.W_OK),
        reason="peaks of memory can't be reset here",
    ),
]
MIB = 2**20
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8}
BLOCK = 4 * (4 * 768 * 768 + 3 * 768 * 2048)
"""A decoder block, fp32 bytes."""


def _config(**sizes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=512, num_key_value_heads=8, max_position_embeddings=32, use_cache=False, **sizes)


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def _peak(rank: int, world: int, base: str) -> tuple[int, int]:
    """Bytes of the peak over what was there before, and of the whole model."""
    from transformers.integrations import HfDeepSpeedConfig

    small = {**LARGE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    if rank == 0:
        for name, sizes in (("small", small), ("large", LARGE)):
            from transformers import AutoModelForCausalLM

            AutoModelForCausalLM.from_config(_config(**sizes)).save_pretrained(Path(base, name))
    dist.barrier()
    _give_back_freed_memory()
    alive = HfDeepSpeedConfig(tiny.ds_config(3))
    _load(Path(base, "small"))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    model = _load(Path(base, "large"))
    after = _status("VmHWM")
    assert {parameter.numel() for parameter in model.parameters()} == {0}
    whole = 4 * sum(parameter.ds_numel for parameter in model.parameters())
    del alive
    return after - before, whole


def _give_back_freed_memory() -> None:
    """Let malloc map what has a mebibyte or more, as it does by itself with tensors of real models (32 MiB): pages that
    it keeps for later would count as held."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MIB)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def test_only_rank_0_reads_and_the_others_hold_a_share_and_a_block(tmp_path: Path) -> None:
    (_, whole), (peak, _) = run_ranks(2, _peak, str(tmp_path), timeout=200.0)
    assert peak < whole / 2 + BLOCK + 16 * MIB, (peak / MIB, whole / MIB)
    assert peak < 0.8 * whole
