"""`run_elastic`: calls the script's training function again in the same process whenever the ranks change.

    def train():                                    round 0: 8 ranks ... a node is lost
        model, engine, loader = ...                 round 1: 6 ranks, called again
        engine.resume()
        for batch in loader: ...

    zeroshard.run_elastic(train)

The process keeps its imports and its CUDA context; a new process takes seconds to minutes to start. All that the
function has made belongs to the ranks of its round and is dropped at the end of the round. Rejected: to change an
engine for other ranks while the script uses it; the script's tensors, loaders and variables would still be for the
former ranks.
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
_MOST_WITHOUT_PROGRESS = 2
"""So many failures in succession that no lost rank explains, without a step between them, end the run."""


def run_elastic(train: Callable[[], T]) -> T:
    """Call `train`, which builds model, engine and loader and trains; again when the job continues with other ranks.

    Outside of an elastic job (`zeroshard run --nodes MIN:MAX`) it is called once. State is kept from round to round by
    `engine.resume`.

    Returns:
        What `train` returns at its end.

    Raises:
        ConfigError, PlanError, UsageError: raised by `train`; a further call would raise them again.
        ZeroShardError, RuntimeError, OSError: raised by `train` twice without a step and without a lost rank.
    """
    place = place_in(os.environ)
    if place is None:
        return train()
    # Imported modules are never freed; the garbage collector would search them for half a second after each round.
    gc.collect()
    gc.freeze()
    most_steps, without_progress = 0, 0
    while True:
        session = Session(place, stays=True, most_steps=most_steps)
        set_session(session)
        failure: Exception | None = None
        try:
            result = train()
        except RanksChanged as change:
            _clear_frames(change)
        except (ZeroShardError, RuntimeError, OSError) as error:
            if _is_of_the_script(error) and session.trouble is None:
                raise
            failure = error
            _log(place, error)
            _clear_frames(error)
        else:
            set_session(None)
            session.end()
            session.close()
            return result
        without_progress = without_progress + 1 if session.most_steps == most_steps else 1
        most_steps = session.most_steps
        place = _next_place(place, session, failure)
        if failure is None or place.lost:
            without_progress = 0
        elif without_progress >= _MOST_WITHOUT_PROGRESS:
            raise failure


def _next_place(place: Place, session: Session, failure: Exception | None) -> Place:
    """Drop what belongs to the ranks of this round, and wait for the next one."""
    set_session(None)
    if failure is not None and session.trouble is None:
        session.interrupt(f"rank {place.rank}: {str(failure).partition(chr(10))[0]}")
    communicators = session.end()
    if dist.is_initialized():
        if dist.group.WORLD is not None:
            communicators.append(dist.group.WORLD)
        dist.destroy_process_group()
    gc.collect()
    drop_in_background(communicators)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = await_place(place.round, session.trouble or "")
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
    """Whether a further call would end in the same error, since the config, the plan or the calls are wrong."""
    caused = isinstance(error.__cause__, dist.DistError)
    return isinstance(error, (ConfigError, PlanError, UsageError)) and not caused


def _log(place: Place, error: Exception) -> None:
    text = "".join(traceback.format_exception(error)).rstrip()
    _LOGGER.info("rank %d leaves round %d:\n%s", place.rank, place.round, text)


def _clear_frames(error: BaseException) -> None:
    """Drop the function's local variables, which the traceback references: model and optimizer."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
