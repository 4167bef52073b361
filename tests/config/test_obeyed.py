"""What a config is resolved to is read by the engine: a key that is called obeyed and read by nobody is a lie."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import zeroshard
from zeroshard.config import resolved

SECTIONS: dict[type, tuple[str, ...]] = {
    resolved.Config: ("config", "resolved"),
    resolved.ZeroConfig: ("zero",),
    resolved.LeafModules: ("leaves",),
    resolved.OffloadConfig: ("offload",),
    resolved.PrecisionConfig: ("precision",),
    resolved.LossScaleConfig: ("loss_scale", "scale", "found"),
    resolved.BatchConfig: ("batch",),
    resolved.ReductionConfig: ("reduction",),
    resolved.OptimizerConfig: ("optimizer",),
    resolved.SchedulerConfig: ("scheduler",),
    resolved.ActivationConfig: ("activations", "wanted", "config"),
    resolved.CheckpointConfig: ("checkpoint",),
    resolved.ObserveConfig: ("observe",),
    resolved.CommsConfig: ("comms",),
    resolved.FlopsConfig: ("flops", "told"),
    resolved.MetricsConfig: ("asked",),
    resolved.FilesConfig: ("files",),
    resolved.WandbConfig: ("wandb",),
    resolved.CometConfig: ("comet",),
}
"""The names under which the package holds each section."""
OWN = {"origins", "world_size"}
"""What the config itself is asked for."""
PACKAGE = Path(zeroshard.__file__).parent
SOURCE = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "config"
)


@pytest.mark.parametrize(
    ("section", "name"), [(section, field.name) for section in SECTIONS for field in fields(section)]
)
def test_every_field_is_read_outside_of_the_config(section: type, name: str) -> None:
    read = re.search(rf"\b(?:{'|'.join(SECTIONS[section])})\.{name}\b", SOURCE)
    assert read is not None or name in OWN, f"nobody reads {section.__name__}.{name}"
