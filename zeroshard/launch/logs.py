"""Each rank's output in files of its own: `DIR/rank_3.out` and `DIR/rank_3.err`, shown on the console as well.

A restart writes `rank_3.restart_1.out`. Files have the global rank in their names, so that nodes can share the
directory. Rejected: torch's names (run, attempt and local rank in a folder with a random name), which don't show the
node of a file if two nodes share a file system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from zeroshard.errors import UsageError
from zeroshard.launch.job import Console


class RankLogs(DefaultLogsSpecs):
    """Where torch's agent writes the ranks' output.

    Args:
        directory: for the agent's error files.
        logs: for files with the ranks' output; None shows it on the console only.
        console: which ranks' output is shown as well.
        restart: number of starts before this one.
        starting: called when the ranks are about to start.

    Raises:
        UsageError: `logs` can't be made.
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
        """The files of each local rank, which are named by the RANK that the agent gave it."""
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
