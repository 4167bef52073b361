"""The bill of a step: what was measured beside what `zeroshard plan --json` predicted, in lines that add up to the gap.

    passes       forward and backward        kernels, and collecting of gradients
    waiting      compute's waits in them     exposed communication, and waiting for the host
    optimizer    the step                    norm and update
    between      everything else             nothing: a plan has no data loader

The planner simulates one stream of compute, so it tells the time of forward and backward together. Where no step of a
log has its device's waits, passes and waiting are one line. What compute waits for the host is in `passes` as measured:
a device does not tell an empty queue from work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.observe.host import BETWEEN, LINK
from zeroshard.observe.record import StepRecord
from zeroshard.observe.runs.components import collective_seconds, components_of, parts_of, with_waits
from zeroshard.observe.runs.log import Run

_OPTIMIZER = ("norm", "update")


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step by the planner.

    Attributes:
        setting: of which row they are.
        passes: kernels of forward and backward, without what is waited.
        waiting: exposed communication, and waiting for the host.
        optimizer: norm and update.
    """

    setting: str
    passes: float
    waiting: float
    optimizer: float

    @property
    def whole(self) -> float:
        return self.passes + self.waiting + self.optimizer


def read_prediction(path: Path, stage: int | None) -> Predicted:
    """The prediction of the row that the planner chose, or of this stage without offload.

    Raises:
        UsageError: the file is not what `zeroshard plan --json` prints, or has no such row.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = [row for row in rows if _is_asked(row, stage)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--plan {path}: not what zeroshard plan --json prints ({error!r})") from error
    if not found:
        which = "chosen row" if stage is None else f"row of stage {stage} without offload"
        raise UsageError(f"--plan {path}: there is no {which}; name a stage that the plan has, with --stage")
    row = found[0]
    kernels = row["time"]["compute"]
    optimizer = sum(kernels.get(kind, 0.0) for kind in _OPTIMIZER)
    waiting = row["time"]["waiting"]
    setting = f"stage {row['stage']}, offload {row['offload']}, checkpointing {row['checkpointing']}"
    return Predicted(setting, row["step_seconds"] - waiting - optimizer, waiting, optimizer)


def _is_asked(row: Mapping[str, Any], stage: int | None) -> bool:
    return row["chosen"] if stage is None else row["stage"] == stage and row["offload"] == "none"


def bill(run: Run, predicted: Predicted) -> Iterator[str]:
    """The lines: each part, its share of the gap, and their sum."""
    timed = [step for step in run.steps[1:] or run.steps if step.whole is not None]
    if not timed:
        return
    parts = {part: median(parts_of(step)[part] for step in timed) for part in (*timed[0].seconds, BETWEEN)}
    passes = parts["forward"] + parts["backward"]
    waits = [_waits(step) for step in with_waits(timed, run.device)]
    if waits:
        waited = median(waits)
        of_passes = (
            ("passes", passes - waited, predicted.passes),
            ("waiting", waited, predicted.waiting),
        )
    else:
        of_passes = (("passes", passes, predicted.passes + predicted.waiting),)
    rows = (*of_passes, ("optimizer", parts["step"], predicted.optimizer), (BETWEEN, parts[BETWEEN], 0.0))
    measured = sum(seconds for _, seconds, _ in rows)
    yield f"the plan ({predicted.setting}) predicted, of which {predicted.waiting * 1000:.2f} ms are waiting:"
    yield f"  {'':<9} {'measured':>12} {'predicted':>12} {'gap':>12}"
    for name, seconds, expected in (*rows, ("step", measured, predicted.whole)):
        gap = seconds - expected
        yield f"  {name:<9} {seconds * 1000:>9.2f} ms {expected * 1000:>9.2f} ms {gap * 1000:>+9.2f} ms"


def _waits(step: StepRecord) -> float:
    """Seconds that forward and backward wait for collectives and the link to host memory."""
    in_passes = {one: spent for one, spent in components_of(step).items() if one[0] in ("forward", "backward")}
    link = sum(spent for (_, kind), spent in in_passes.items() if kind == LINK)
    return collective_seconds(in_passes) + link
