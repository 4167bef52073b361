"""What DeepSpeed writes down when it is built: versions, and which operators it has compiled ahead (here: none)."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda import nccl

from deepspeed._exports import lazy
from deepspeed._version import GIT, VERSION
from deepspeed.ops.op_builder import COMPATIBLE
from zeroshard.engine.build import default_device

version = VERSION
git_hash = git_branch = GIT
accelerator_name = default_device().type
compatible_ops = dict(COMPATIBLE)
installed_ops = dict.fromkeys(COMPATIBLE, False)


def _torch_info() -> dict[str, Any]:
    """Versions as major.minor, "0.0" for what this torch has not."""
    major, minor = nccl.version()[:2] if torch.cuda.is_available() else (0, 0)
    return {
        "version": _short(torch.__version__),
        "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "cuda_version": _short(torch.version.cuda or "0.0"),
        "nccl_version": f"{major}.{minor}",
        "hip_version": _short(torch.version.hip or "0.0"),
    }


def _short(text: str) -> str:
    return ".".join(text.split(".")[:2])


torch_info = _torch_info()

__getattr__, __dir__ = lazy(__name__, {})
