"""Architectures of transformers train at stage 3 as in plain torch, bit for bit: all of them by `ZEROSHARD_HF_TESTS=1`.

A sample runs always. All of a family run in one group of processes: importing transformers costs more than training.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

import pytest

from tests.compat.architectures.audio import AUDIO
from tests.compat.architectures.case import Architecture
from tests.compat.architectures.decoders import DECODERS
from tests.compat.architectures.encoder_decoders import ENCODER_DECODERS
from tests.compat.architectures.encoders import ENCODERS
from tests.compat.architectures.mixtures import MIXTURES
from tests.compat.architectures.multimodal import MULTIMODAL
from tests.compat.architectures.state_space import STATE_SPACE
from tests.compat.architectures.vision import VISION
from tests.compat.bits import differences
from tests.support.distributed import run_ranks
from tests.support.installed import need

need("transformers")

FAMILIES = {
    "decoders": DECODERS,
    "mixtures of experts": MIXTURES,
    "state spaces": STATE_SPACE,
    "encoders": ENCODERS,
    "encoders with decoders": ENCODER_DECODERS,
    "vision": VISION,
    "audio": AUDIO,
    "several modalities, series": MULTIMODAL,
}
ALL: dict[str, Architecture] = {name: case for family in FAMILIES.values() for name, case in family.items()}
SAMPLE = ("Mixtral", "Mamba", "Whisper", "SigLIP", "DeBERTa")


def _train(rank: int, world: int, names: Sequence[str], stage: int) -> dict[str, str]:
    """What is wrong with each, up to the first that raises: ranks may be in different places after it."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = "; ".join(differences(ALL[name], stage, rank, world))
        except Exception:
            found[name] = traceback.format_exc()
            break
    return found


def _problems(names: Sequence[str], stage: int = 3) -> str:
    """What is wrong with any of them; new processes go on behind one that raised."""
    found: dict[str, str] = {}
    while len(found) < len(names):
        found |= run_ranks(2, _train, names[len(found) :], stage, timeout=600)[0]
    return "\n".join(f"{name}: {problem}" for name, problem in found.items() if problem)


def test_a_sample_of_architectures_trains_as_in_plain_torch() -> None:
    assert not (problems := _problems(SAMPLE)), problems


@pytest.mark.skipif(os.environ.get("ZEROSHARD_HF_TESTS") != "1", reason="set ZEROSHARD_HF_TESTS=1")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_train_as_in_plain_torch(family: str) -> None:
    assert not (problems := _problems(tuple(FAMILIES[family]))), problems


def test_no_architecture_is_listed_twice() -> None:
    assert len(ALL) == sum(map(len, FAMILIES.values()))
