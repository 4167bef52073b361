"""Every error that zeroshard raises on purpose.

A message says what is wrong, where (JSON path, unit, parameter or rank) and what to do. Mistakes of the user are also
`ValueError`s, so that callers who know nothing of zeroshard can catch them; wrong calls and configs are also
`AssertionError`s, which scripts for DeepSpeed expect of them. A broken invariant of our own is a plain `assert`.
"""

from __future__ import annotations


class ZeroShardError(Exception):
    """Base of every error raised by zeroshard."""


class ConfigError(ZeroShardError, ValueError, AssertionError):
    """The configuration can't be obeyed; the message names the JSON path. `problems` holds all that were found."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        if len(problems) > 1:
            lines = [f"{len(problems)} problems in the config:", *(f"  {n}. {p}" for n, p in enumerate(problems, 1))]
            super().__init__("\n".join(lines))
        else:
            super().__init__(*problems)


class PlanError(ZeroShardError, ValueError):
    """The model, optimizer and plan can't be put together; the message names the unit or parameter."""


class UsageError(ZeroShardError, ValueError, AssertionError):
    """A call came at a moment or with arguments for which it has no meaning."""


class TilingError(UsageError, RuntimeError):
    """A layer can't be cut into so many tiles."""


class UnscaledLossError(UsageError, RuntimeError):
    """A backward in float16 began from a loss without the loss scale, so that its gradients would be too small."""


class CheckpointError(ZeroShardError, ValueError):
    """A checkpoint is missing, torn or of another model; the message names file and tensor."""


class DivergenceError(ZeroShardError, RuntimeError):
    """Ranks issued different collectives; the message names the first differing operation, unit and rank."""


class RanksChanged(ZeroShardError):
    """In an elastic job: the ranks of this round are no longer together. `run_elastic` calls the training again."""


class ZeroShardWarning(UserWarning):
    """Something works but not as the user probably expects."""


class NonFiniteError(ZeroShardError, ArithmeticError):
    """Gradients hold inf or NaN; the step was not applied. The message names the first parameter."""


class SpillError(ZeroShardError, RuntimeError):
    """State on disk could not be read or written in mid-run; the message names folder and rank."""
