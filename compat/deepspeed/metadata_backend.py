"""Builds the wheel with setuptools and adds metadata under the name `deepspeed`.

    zeroshard_deepspeed-V.dist-info/                            the distribution that pip installs and removes
    zeroshard_deepspeed-V.data/purelib/deepspeed-W.dist-info/   what `importlib.metadata` finds for "deepspeed"

transformers, accelerate and Lightning take a package for installed when both the module and metadata of its name are
there. A wheel may have one .dist-info at its root, so the second travels as data. It has no RECORD, so pip refuses to
put the real deepspeed over it and to remove it alone; removing zeroshard-deepspeed removes both. Rejected: naming the
distribution `deepspeed`, which would be somebody else's project on every index.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_VERSIONS = Path(__file__).parent / "src" / "deepspeed" / "_version.py"


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    _add_metadata(Path(wheel_directory) / name)
    return name


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    _add_metadata(Path(wheel_directory) / name)
    return name


def _add_metadata(wheel: Path) -> None:
    """Rewrite the wheel with the second metadata in it."""
    found = re.search(r'^VERSION = "([^"]+)"', _VERSIONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    version, project = found[1], "-".join(wheel.name.split("-")[:2])
    path = f"{project}.data/purelib/deepspeed-{version}.dist-info/METADATA"
    text = (
        f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
        "Summary: Not DeepSpeed: zeroshard under its import name, from zeroshard-deepspeed\n"
    ).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    rewritten = wheel.with_suffix(".rewritten")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(rewritten, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename == f"{project}.dist-info/RECORD":
                content = f"{path},sha256={digest},{len(text)}\n".encode() + content
            new.writestr(item, content)
        new.writestr(path, text)
    shutil.move(rewritten, wheel)
