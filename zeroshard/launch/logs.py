"""Each rank's output in files of its own: `DIR/rank_3.out` and `DIR/rank_3.err`, shown on the console as well.

A restart writes `rank_3.restart_1.out`. Named by global rank, so that nodes can share the directory. torch's own scheme
(run, attempt, local rank, under a random name) was rejected: on two nodes with one file system nobody could tell whose
`0/stderr.log` is whose.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from zeroshard.errors import UsageError
from zeroshard.launch.job import Console


class RankLogs(DefaultLogsSpecs):
    """`directory` holds the agent's error files; `logs` is where output goes, None for the console alone.

    `restart` counts the starts before this one; `starting` is called when the ranks are about to start.
    """

    def __init__(
        self, directory: str, logs: Path | None, console: Console, restart: int, starting: Callable[[], None]
    ) -> None:
        super().__init__(log_dir=directory)
        self._logs = logs
        self._starting = starting
        self._console = console
        self._restart = restart
        if logs is not None:
            try:
                logs.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--log-dir {logs}: it can't be made ({error.strerror})") from error

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of each local rank, by the RANK that the agent has given it."""
        self._starting()
        destinations = super().reify(envs)
        if self._logs is None:
            return destinations
        out = {local: str(self._file(env, "out")) for local, env in envs.items()}
        err = {local: str(self._file(env, "err")) for local, env in envs.items()}
        shown = [local for local, env in envs.items() if self._is_shown(int(env["RANK"]))]
        return replace(
            destinations,
            stdouts=out,
            stderrs=err,
            tee_stdouts={local: out[local] for local in shown},
            tee_stderrs={local: err[local] for local in shown},
        )

    def _is_shown(self, rank: int) -> bool:
        return self._console is Console.ALL or (self._console is Console.FIRST and rank == 0)

    def _file(self, env: dict[str, str], kind: str) -> Path:
        assert self._logs is not None
        restart = f".restart_{self._restart}" if self._restart else ""
        return self._logs / f"rank_{env['RANK']}{restart}.{kind}"


def log_directory(given: str | None) -> Path | None:
    return None if given is None else Path(os.path.expanduser(given))
