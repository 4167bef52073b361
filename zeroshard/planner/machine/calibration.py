"""Reads and writes what `zeroshard doctor` measured: rates that the planner takes instead of those of an H100."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zeroshard.errors import PlanError
from zeroshard.planner.files import read_json, writing
from zeroshard.planner.machine.hardware import Cluster, Efficiency


@dataclass(frozen=True)
class Calibration:
    """Measured values for fields of `Efficiency`, and the machine that they were measured on.

    Attributes:
        machine: name of the card, or of the processor if there is none.
        gpu: name of the planner's profile of the card; "" if there is none.
        efficiency: the fields that could be measured.
        measured: the figures in words.
    """

    machine: str
    gpu: str
    efficiency: Mapping[str, float]
    measured: Mapping[str, str]

    def save(self, path: Path) -> None:
        """Write it as JSON. Raises PlanError if that fails."""
        with writing("--save", path):
            path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration. Raises PlanError, with the field, for a file that is none."""
    content = read_json(f"--calibration {path}", path, absent=f"; zeroshard doctor --save {path} makes one")
    if not isinstance(content, dict) or not isinstance(content.get("efficiency"), dict):
        raise PlanError(f"--calibration {path}: no 'efficiency', so zeroshard doctor did not write it")
    known = [field.name for field in fields(Efficiency)]
    for name, value in content["efficiency"].items():
        if name not in known:
            near = get_close_matches(str(name), known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(f"--calibration {path}: efficiency.{name} is not known{hint}")
        if not _is_rate(value):
            raise PlanError(f"--calibration {path}: efficiency.{name} must be a number above 0, not {value!r}")
    measured = content.get("measured") or {}
    if not isinstance(measured, dict):
        raise PlanError(f"--calibration {path}: measured must be an object of texts, not {measured!r}")
    return Calibration(
        str(content.get("machine", "")),
        str(content.get("gpu", "")),
        {name: float(value) for name, value in content["efficiency"].items()},
        measured,
    )


def calibrated(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with the measured values in place of the defaults.

    Raises:
        PlanError: the calibration is of another card than the cluster's.
    """
    if calibration.gpu and calibration.gpu != cluster.gpu.name:
        raise PlanError(
            f"--calibration is of {calibration.gpu}, the cluster has {cluster.gpu.name}: its shares say nothing of that"
        )
    return replace(cluster, efficiency=replace(cluster.efficiency, **calibration.efficiency))


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
