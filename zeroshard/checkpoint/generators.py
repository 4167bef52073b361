"""Saves and restores the states of random number generators: torch's on CPU and GPU, Python's and NumPy's.

Each rank saves its own. At another number of ranks no state would continue the old ones, and the generators are left as
they are.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zeroshard.errors import CheckpointError


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, second = random.getstate()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": [version, list(internal), second],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device))
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Raises CheckpointError for states that `set_generators` could not restore on a CPU."""
    _set(states, random.Random(), np.random.RandomState(), torch.Generator())


def set_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore saved states. Raises CheckpointError for values that are no states."""
    _set(states, random, np.random, torch.default_generator)
    if device.type == "cuda" and "cuda" in states:
        try:
            torch.cuda.set_rng_state(_bytes(states["cuda"]), device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint's state of a GPU's random numbers is none: {error}") from error


def _set(states: Mapping[str, Any], python: Any, numpy: Any, torchs: torch.Generator) -> None:
    try:
        version, internal, second = states["python"]
        python.setstate((version, tuple(internal), second))
        kind, keys, position, has_gauss, gauss = states["numpy"]
        numpy.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torchs.set_state(_bytes(states["torch"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint's state of a random number generator is none: {error}") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
