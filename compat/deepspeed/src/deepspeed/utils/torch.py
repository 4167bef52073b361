"""Questions about the installed torch."""

from __future__ import annotations

import re

import torch

from deepspeed._exports import lazy

__getattr__, __dir__ = lazy(__name__, {})


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's major and minor version lie within these bounds, which belong to the range.

    A bound is text, "2.10" say; a number such as 2.4 is read as it is printed.

    Raises:
        ValueError: neither bound, or both.
    """
    if (min_version is None) == (max_version is None):
        raise ValueError("required_torch_version: give one of min_version and max_version")
    installed = _major_minor(torch.__version__)
    if min_version is not None:
        return installed >= _major_minor(str(min_version))
    return installed <= _major_minor(str(max_version))


def _major_minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return int(found[1]), int(found[2] or 0)
