"""`run_elastic`: the script's training as a function, called again in the same process whenever the ranks change.

    def train():                                    round 0: 8 ranks ... a node is lost
        model, engine, loader = ...                 round 1: 6 ranks, called again
        engine.resume()
        for batch in loader: ...

    zeroshard.run_elastic(train)

A process that stays keeps what it has imported, and its CUDA context; starting one anew takes seconds to minutes. What
the function has made belongs to the ranks of its round, and is given up with it. Rejected: mending an engine for other
ranks while the script holds it, whose every tensor, loader and local variable is of the ranks before.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroshard.elastic.place import Place, await_place, place_in
from zeroshard.elastic.session import Session, set_session
from zeroshard.errors import ConfigError, PlanError, RanksChanged, UsageError, ZeroShardError

T = TypeVar("T")
_LOGGER = logging.getLogger("zeroshard")
_FRUITLESS = 2
"""Failures that no lost rank explains, without a step between them, that end the run."""


def run_elastic(train: Callable[[], T]) -> T:
    """Call `train`, which builds model, engine and loader and trains; again whenever the job goes on with other ranks.

    Outside of an elastic job (`zeroshard run --nodes MIN:MAX`) it is called once. What it is to keep from round to
    round goes through `engine.resume`.

    Returns:
        What `train` returns when it has come to its end.
    """
    place = place_in(os.environ)
    if place is None:
        return train()
    # What was imported stays for good; looking through all of it at the end of each round takes half a second.
    gc.collect()
    gc.freeze()
    best, fruitless = 0, 0
    while True:
        session = Session(place, stays=True, best=best)
        set_session(session)
        failure: Exception | None = None
        try:
            done = train()
        except RanksChanged as change:
            _forget_frames(change)
        except (ZeroShardError, RuntimeError, OSError) as error:
            if _is_of_the_script(error) and session.trouble is None:
                raise
            failure = error
            _log(place, error)
            _forget_frames(error)
        else:
            set_session(None)
            session.end()
            session.close()
            return done
        fruitless = fruitless + 1 if session.best == best else 1
        best = session.best
        place = _next_place(place, session, failure)
        if failure is None or place.lost:
            fruitless = 0
        elif fruitless >= _FRUITLESS:
            raise failure


def _next_place(place: Place, session: Session, failure: Exception | None) -> Place:
    """Give up the ranks of this round, and wait for the next one."""
    set_session(None)
    communicators = session.end()
    if dist.is_initialized():
        if dist.group.WORLD is not None:
            communicators.append(dist.group.WORLD)
        dist.destroy_process_group()
    gc.collect()
    drop_in_background(communicators)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trouble = session.trouble
    if trouble is None and failure is not None:
        trouble = f"rank {place.rank}: {str(failure).partition(chr(10))[0]}"
    found = await_place(place.round, trouble or "")
    session.close()
    return found


def drop_in_background(communicators: list[dist.ProcessGroup]) -> None:
    """Drop the last references to communicators of ranks of which some may be lost; the list is empty afterwards.

    The last reference waits for running operations. gloo can't abort one, and ends one whose rank fell silent only
    after the group's timeout, so a thread waits, and not the next round.
    """
    mine = communicators.copy()
    communicators.clear()
    threading.Thread(target=mine.clear, name="zeroshard-old-communicators", daemon=True).start()


def _is_of_the_script(error: Exception) -> bool:
    """Whether calling again would end in the same: the config, the plan or the calls are wrong."""
    caused = isinstance(error.__cause__, dist.DistError)
    return isinstance(error, (ConfigError, PlanError, UsageError)) and not caused


def _log(place: Place, error: Exception) -> None:
    text = "".join(traceback.format_exception(error)).rstrip()
    _LOGGER.info("rank %d leaves round %d:\n%s", place.rank, place.round, text)


def _forget_frames(error: BaseException) -> None:
    """Let go of what the function had: model and optimizer would be held by the traceback."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
