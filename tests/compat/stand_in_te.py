"""A stand-in for Transformer Engine, which needs a GPU: what accelerate imports of it, with layers of plain torch.

Its layers have parameters of their own, as the real ones, so that accelerate has to tell the optimizer about them.
"""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": """
import contextlib
import torch

entered = []


class Linear(torch.nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=params_dtype)) if bias else None

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, size, eps=1e-5, params_dtype=torch.float32):
        super().__init__(size, eps=eps, dtype=params_dtype)


TransformerLayer = Linear


@contextlib.contextmanager
def fp8_autocast(enabled, fp8_recipe):
    entered.append((enabled, type(fp8_recipe).__name__))
    yield
""",
    "transformer_engine/pytorch/fp8.py": 'def check_mxfp8_support():\n    return False, "needs a GPU"\n',
    "transformer_engine/common/__init__.py": "",
    "transformer_engine/common/recipe.py": """
import enum


class Format(enum.Enum):
    HYBRID = 0
    E4M3 = 1


class DelayedScaling:
    def __init__(self, **settings):
        self.settings = settings
""",
    "transformer_engine-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.0\n",
}


def write(folder: Path) -> None:
    """Write the package, and metadata for it, into a folder that is to be on sys.path."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
