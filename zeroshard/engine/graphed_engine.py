"""What an engine does on the host around a step that is replayed as a CUDA graph.

    before          a scheduler sets the next learning rate, for which the outcome of the last step has to be known
    capture         the engine's calls run as they are, and what they counted is kept with the graph
    after           what follows an update: a line of progress, saving on SIGTERM, changes of an elastic job
    each replay     before, the same counts once more, after

Rejected: a key of the config that makes graphs of `engine(...)`, `engine.backward` and `engine.step` apart. What the
script does between them would have to stay out of all three, and their collectives could not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import UsageError


@dataclass(frozen=True)
class Counts:
    """What one captured step counted: micro-batches on this rank, and samples over all ranks."""

    micro_batches: int
    samples: int


class EngineBesideGraph:
    """The part of an engine that stays on the host.

    Args:
        engine: one whose config asks for nothing that times or shows single passes.

    Raises:
        UsageError: it does.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        if engine._observer is not None:
            raise UsageError(
                "GraphedStep: the engine times and reports its forwards and backwards, which a replay does not have; "
                "leave steps_per_print, wall_clock_breakdown, flops_profiler and monitors out of the config"
            )
        self._engine = engine

    def before(self) -> None:
        """Before a step: let the scheduler set its rate, which waits for the last one's outcome."""
        if self._engine.lr_scheduler is not None:
            self._engine.count_outcome()
        else:
            self._engine.count_skipped()

    @contextmanager
    def captured(self) -> Iterator[list[Counts]]:
        """Around the capture of one step; the list then has what it counted. An error inside leaves nothing counted."""
        engine, found, before = self._engine, list[Counts](), self._counters()
        engine.in_capture = True
        try:
            yield found
            made = engine.global_steps - before[0]
            if made != 1 or engine._batching.since_step:
                raise UsageError(
                    f"GraphedStep: the function made {made} steps of the engine; it makes one, with all of its "
                    "micro-batches, and calls engine.step() after each of them"
                )
        except BaseException:
            engine.global_steps, engine.micro_steps, engine.global_samples, engine._batching.since_step = before
            engine._scheduler_arguments = None
            engine._size_of_step()  # forgets the backwards that were made
            raise
        finally:
            engine.in_capture = False
        found.append(Counts(engine.micro_steps - before[1], engine.global_samples - before[2]))

    def _counters(self) -> tuple[int, int, int, int]:
        engine = self._engine
        return engine.global_steps, engine.micro_steps, engine.global_samples, engine._batching.since_step

    def after(self) -> None:
        """After the launch of a step."""
        self._engine.end_step()

    def replayed(self, counts: Counts) -> None:
        """After the launch of a replay."""
        self._engine.count_step(counts.micro_batches, counts.samples)
        self.after()
