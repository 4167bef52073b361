"""Codes made and read by native code on a processor, and by kernels on a GPU, have the bits of torch's operations."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from tests.support.coded import assert_same_codes, through_codes
from zeroshard.engine.memory import block_codes, kernel_codes, native_codes
from zeroshard.plan.hops import BETWEEN, WITHIN
from zeroshard.plan.placement import Blocks

BLOCKS = (WITHIN, BETWEEN, Blocks(4, 64))


@pytest.mark.skipif(native_codes.load_library() is None, reason="no C++ compiler was there at installation")
def test_native_code_and_torch_give_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, blocks in product((torch.float32, torch.bfloat16), BLOCKS):
        native = through_codes(dtype, blocks)
        with monkeypatch.context() as patched:
            patched.setattr(native_codes, "load_library", lambda: None)
            assert_same_codes(native, through_codes(dtype, blocks))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 runs Triton on a CPU")
def test_interpreted_kernels_give_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 alone: the interpreter cuts bfloat16 off instead of rounding it."""
    for blocks in BLOCKS:
        expected = through_codes(torch.float32, blocks, error_dtype=torch.float32)
        with monkeypatch.context() as patched:
            patched.setattr(block_codes, "native_codes", kernel_codes)
            patched.setattr(kernel_codes, "_suits", lambda *_: True)
            assert_same_codes(through_codes(torch.float32, blocks, error_dtype=torch.float32), expected)
