"""`wandb`: a run of Weights & Biases; its own process sends what is logged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from zeroshard.observe.monitor import Written
from zeroshard.observe.writers.optional import optional_package

PACKAGE = ("wandb", "wandb", "wandb.enabled")


class WeightsAndBiases:
    """Logs events to a run."""

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        self._run = optional_package(*PACKAGE).init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Written]) -> None:
        """Log events, those of the same place on the x-axis in one call."""
        for samples, of_place in groupby(events, key=lambda event: event[2]):
            self._run.log({name: value for name, value, _ in of_place}, step=samples)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
