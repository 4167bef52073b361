"""`comet`: an experiment of Comet, logged to every `samples_log_interval` samples."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.config.resolved import CometConfig
from zeroshard.observe.monitor import Written
from zeroshard.observe.writers.optional import optional_package

PACKAGE = ("comet_ml", "comet_ml", "comet.enabled")


class Comet:
    """Logs events to an experiment."""

    def __init__(self, comet: CometConfig) -> None:
        named = {
            "api_key": comet.api_key,
            "project": comet.project,
            "workspace": comet.workspace,
            "experiment_key": comet.experiment_key,
            "mode": comet.mode,
            "online": comet.online,
        }
        given = {name: value for name, value in named.items() if value is not None}
        self._experiment = optional_package(*PACKAGE).start(**given)
        if comet.experiment_name is not None:
            self._experiment.set_name(comet.experiment_name)
        self._interval = comet.samples_log_interval
        self._logged: dict[str, int] = {}

    def write(self, events: Sequence[Written]) -> None:
        """Log each event whose name was not logged for so many samples."""
        for name, value, samples in events:
            last = self._logged.get(name)
            if last is None or samples >= last + self._interval:
                self._logged[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()
