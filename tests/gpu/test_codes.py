"""Codes made and read by kernels on a GPU have the bits of those of a processor."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.gpu.test_training import GPUS
from tests.support.coded import assert_same_codes, through_codes
from zeroshard.plan.hops import BETWEEN, WITHIN
from zeroshard.plan.placement import DIFFERENCE_CODES, GATHER_CODES, LOW_GATHER_CODES

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
EVERY = sorted({WITHIN, BETWEEN, GATHER_CODES, LOW_GATHER_CODES, DIFFERENCE_CODES}, key=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_and_a_processor_make_the_same_codes(dtype: torch.dtype) -> None:
    for blocks, error in product(EVERY, (torch.bfloat16, torch.float32)):
        here = through_codes(dtype, blocks, "cuda", error_dtype=error)
        assert_same_codes(here, through_codes(dtype, blocks, error_dtype=error))
