"""Saves and loads a sharded model, its optimizer and the state of a run: `zeroshard.save` and `zeroshard.load`.

    zeroshard.save(model, "checkpoints", "step100", scheduler=scheduler, client_state={"epoch": 3})
    loaded = zeroshard.load(model, "checkpoints", scheduler=scheduler)

A checkpoint has the names and shapes of the model and does not depend on the plan: it can be loaded with any number of
ranks, stage, dtype and accumulation. All ranks call these functions. The engine's `save_checkpoint` and
`load_checkpoint` add its counters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zeroshard.checkpoint import directory
from zeroshard.checkpoint.audit import Act, check_load, record
from zeroshard.checkpoint.error_barrier import CollectiveBarrier, on_all_ranks
from zeroshard.checkpoint.generators import generator_states
from zeroshard.checkpoint.keys import KeyService, key_in_environment, service_of
from zeroshard.checkpoint.manifest import MANIFEST, read_manifest
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.remote import Remote
from zeroshard.checkpoint.saver import Request, Saver
from zeroshard.checkpoint.signature import Signer, check_signature, signing_on, trusted_keys
from zeroshard.checkpoint.values import pack, unpack
from zeroshard.engine.core.handle import Handle, handle_of
from zeroshard.engine.saving.all_stages import WholeModel, whole_model
from zeroshard.engine.saving.prepared_load import EVERYTHING, Loaded, PreparedLoad, Selection
from zeroshard.engine.saving.saved_model import (
    buffer_sums,
    differing_buffers,
    pieces,
)
from zeroshard.engine.saving.saved_options import (
    saved_groups,
)
from zeroshard.engine.step.attached import find_optimizer, find_stepper
from zeroshard.engine.step.schedule import saved_schedule
from zeroshard.engine.step.step_base import StepperBase
from zeroshard.errors import CheckpointError, UsageError, ZeroShardError, ZeroShardWarning
from zeroshard.optim.optimizer import ShardedOptimizer

ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


def save(
    model: nn.Module,
    save_dir: str | os.PathLike[str],
    tag: str,
    *,
    scheduler: Any = None,
    client_state: ClientState = None,
    background: bool = False,
    latest: bool = True,
    keep: int | None = None,
    frozen: bool = True,
    counters: Mapping[str, Any] | None = None,
    encryption_key: str | KeyService | None = None,
    audit: bool = False,
    remote: str | None = None,
    signing_key: str | Signer | None = None,
) -> Path:
    """Save everything needed to go on; called by all ranks, between steps.

    Args:
        tag: name of the checkpoint; one of the same name is replaced once this one is whole.
        client_state: numbers, text, lists, tuples and dicts, given back by `load`, or a function that gives them. Rank
            0's is saved.
        background: copy the state into host memory and write it in a thread. The next save, load or
            `wait_for_checkpoint` waits for it and raises its error.
        latest: make it the one that a load without a tag finds.
        keep: the number of newest checkpoints that stay in the directory; older ones are removed afterwards.
        frozen: also save frozen parameters.
        counters: the engine's counters.
        encryption_key: encrypts the checkpoint; `file:PATH`, `env:NAME`, `command:PROGRAM`, or a KeyService.
        audit: from now on log all saves, loads and removals of checkpoints in the directory.
        remote: fsspec URL (s3://bucket/run) to which the complete checkpoint is copied; `keep` also applies there.
        signing_key: private Ed25519 key that signs the checkpoint; as `encryption_key`, or a Signer. Rank 0 reads it.

    Returns:
        The checkpoint's folder, there once the save has ended.

    Raises:
        CheckpointError: it can't be written, on this rank or another; older checkpoints are unchanged.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    saver = saver_of(handle)
    where = f"{save_dir}/{tag}"

    def prepare() -> tuple[Request, dict[str, int]]:
        base = checked_directory(save_dir)
        base = _absolute(base) if background else base
        directory.check_tag(tag)
        if keep is not None and keep < 1:
            raise UsageError(f"save(keep={keep}): at least the new checkpoint is kept; None keeps all")
        _finish_running(handle, saver, saving=True)
        state = saved_state(handle, model, stepper, scheduler, client_state, counters, frozen, names)
        rank_state = {"generators": generator_states(handle.device)}
        service = service_of(encryption_key)
        copies = None if remote is None else Remote(remote)
        signing = None if signing_key is None else signing_on(saver.barrier().rank, signing_key)
        more = (latest, keep, service, audit, copies, signing)
        request = Request(base, tag, (), names.aliases, state, rank_state, *more)
        return request, buffer_sums(handle)

    names = whole_model(handle, model)
    request, sums = on_all_ranks(saver.barrier(), prepare, where)
    _warn_of_gradients(handle)
    differing = differing_buffers(handle, sums)

    def complete() -> Request:
        tensors = pieces(handle, None if stepper is None else stepper.update, differing, frozen=frozen)
        whole = replace(request, pieces=tensors)
        whole.check()
        return whole

    saver.save(on_all_ranks(saver.barrier(), complete, where), background=background)
    return request.final


def load(
    model: nn.Module,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    scheduler: Any = None,
    selection: Selection = EVERYTHING,
    encryption_key: str | KeyService | None = None,
    signed_by: str | Sequence[str] | None = None,
) -> Loaded:
    """Go on from a checkpoint; called by all ranks.

    Args:
        tag: None for the newest.
        scheduler: takes over the saved scheduler's state.
        encryption_key: of an encrypted one, as at the save; by default what ZEROSHARD_CHECKPOINT_KEY names.
        signed_by: public keys (`ed25519:BASE64`, or `file:PATH` of a file with such lines), of which one must have
            signed it; by default those in ZEROSHARD_CHECKPOINT_SIGNED_BY. Without any, no signature is demanded.

    Raises:
        CheckpointError: it is not there, damaged, not signed as demanded, or of another model or optimizer, on this
            rank or another; nothing was changed. The message names file and tensor.
    """
    handle, stepper = handle_of(model), find_stepper(model)
    saver = saver_of(handle)

    def settle() -> Path:
        _finish_running(handle, saver)
        return checked_directory(load_dir)

    folder = _agreed_folder(saver.barrier(), on_all_ranks(saver.barrier(), settle, load_dir), tag)

    def check() -> None:
        trusted = trusted_keys(signed_by)
        if trusted:
            check_signature(folder, trusted, share=saver.barrier().rank, shares=saver.barrier().size)

    on_all_ranks(saver.barrier(), check, folder, "; nothing was changed here")  # before anything of it is interpreted
    names = whole_model(handle, model)

    def prepare() -> PreparedLoad:
        if saver.barrier().rank == 0:
            check_load(folder.parent, folder)
        service = service_of(encryption_key)
        reader = CheckpointReader(folder, service)
        _warn_of_plain(reader, service)
        try:
            return PreparedLoad(handle, model, stepper, scheduler, reader, selection, names)
        except (ZeroShardError, Warning) as error:
            reader.close()
            if isinstance(error, CheckpointError) and str(folder) not in str(error):
                raise CheckpointError(f"{folder / MANIFEST}: {error}; nothing was changed") from error
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reader.close()
            what = f"{type(error).__name__} {error}"
            raise CheckpointError(f"{folder / MANIFEST}: its state is not what it must be: {what}") from error

    prepared = on_all_ranks(saver.barrier(), prepare, folder, "; nothing was changed here")
    try:
        first = saver.barrier().rank == 0
        on_all_ranks(saver.barrier(), lambda: record(folder.parent, Act.LOAD, folder.name) if first else None, folder)
        prepared.apply(saver.barrier())
    finally:
        prepared.reader.close()
    return prepared.loaded


def any_checkpoint(model: nn.Module, load_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory holds a checkpoint, as rank 0 sees it; called by all ranks."""
    barrier = saver_of(handle_of(model)).barrier()

    def look() -> bool:
        saver_of(handle_of(model)).wait()
        base = checked_directory(load_dir)
        return barrier.rank == 0 and bool(directory.whole(base))

    return bool(barrier.broadcast_text("there" if on_all_ranks(barrier, look, load_dir) else "", 0))


def newest_steps(base: Path) -> int:
    """The optimizer steps of the newest checkpoint in a directory; 0 where there is none, or it does not say."""
    if not directory.whole(base):
        return 0
    try:
        state = read_manifest(directory.find(base), key_in_environment()).state
        return int(unpack(state["counters"]).get("global_steps", 0))
    except (CheckpointError, KeyError, TypeError, ValueError):
        return 0


def fetch_newest(model: nn.Module, remote: str, load_dir: str | os.PathLike[str]) -> None:
    """Copy the newest checkpoint of a store into a directory that has none; called by all ranks, which share it."""
    barrier = saver_of(handle_of(model)).barrier()

    def fetch() -> None:
        if barrier.rank == 0:
            Remote(remote).fetch_newest(checked_directory(load_dir))

    on_all_ranks(barrier, fetch, remote)


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait for an asynchronous save. Raises CheckpointError where it failed."""
    saver_of(handle_of(model)).wait()


def saver_of(handle: Handle) -> Saver:
    """The saver of a model, made when it is first needed."""
    if handle.saver is None:
        comm = handle.comm
        control, store, watchdog = comm.control, comm.mesh.store(), comm.watchdog
        if comm.stages is not None:
            control, store, watchdog = comm.stages.everyone, comm.stages.store, comm.stages.watchdog
        handle.saver = Saver(control, store, watchdog, handle.device)
    return handle.saver


def _finish_running(handle: Handle, saver: Saver, *, saving: bool = False) -> None:
    """Finish all running operations and the last save. Raises CheckpointError if that save failed."""
    saver.wait()
    if saving:
        handle.runtime.drain_for_saving()
    else:
        handle.runtime.drain()
    handle.check_members()


def _warn_of_gradients(handle: Handle) -> None:
    if handle.runtime.gradients.present:
        warnings.warn(
            "saving between backward and step: the gradients since the last step are in no checkpoint; a resumed run "
            "computes them anew",
            ZeroShardWarning,
            stacklevel=3,
        )


def _warn_of_plain(reader: CheckpointReader, service: KeyService | None) -> None:
    if service is not None and reader.manifest.encryption is None:
        warnings.warn(
            f"{reader.folder} is not encrypted, although this run has a key for checkpoints: it may have been changed "
            "since it was saved",
            ZeroShardWarning,
            stacklevel=3,
        )


def _agreed_folder(barrier: CollectiveBarrier, base: Path, tag: str | None) -> Path:
    """The checkpoint that rank 0 finds; on a network file system other ranks might not see the newest one yet."""
    found = on_all_ranks(barrier, lambda: directory.find(base, tag).name if barrier.rank == 0 else "", base)
    return base / barrier.broadcast_text(found, 0)


# What is saved beside the tensors.


def checked_directory(path: str | os.PathLike[str]) -> Path:
    """A directory of checkpoints as a path. Raises UsageError for empty text, and for other types."""
    if isinstance(path, str) and not path:
        raise UsageError("a checkpoint's directory is empty text; '.' is the current one")
    try:
        return Path(path)
    except TypeError as error:
        raise UsageError(f"a checkpoint's directory is a {type(path).__name__}; give text or a pathlib.Path") from error


def _absolute(directory: Path) -> Path:
    """The absolute path, for a background save: the program may change its working directory in the meantime."""
    try:
        return directory.absolute()
    except OSError:  # there is no working directory any more; the save says so
        return directory


def saved_state(
    handle: Handle,
    model: nn.Module,
    stepper: StepperBase | None,
    scheduler: Any,
    client_state: ClientState,
    counters: Mapping[str, Any] | None,
    frozen: bool,
    names: WholeModel,
) -> dict[str, Any]:
    """What is saved beside the tensors, equal on all ranks."""
    optimizer = find_optimizer(model)
    if callable(client_state):
        client_state = client_state()
    if client_state is not None and not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; give a dict of what is to be kept")
    return {
        "optimizer": _optimizer_state(optimizer, stepper, names),
        "scaler": None if stepper is None or stepper.scaler is None else dict(stepper.scaler.state_dict()),
        "scheduler": None if scheduler is None else saved_schedule(scheduler),
        "client_state": pack(dict(client_state or {}), "client_state"),
        "counters": pack(dict(counters or {}), "counters"),
        "frozen": frozen,
        "ranks": handle.comm.ranks,
    }


def _optimizer_state(
    optimizer: ShardedOptimizer | None, stepper: StepperBase | None, names: WholeModel
) -> dict[str, Any] | None:
    if optimizer is None or stepper is None or names.groups is None:
        return None
    counters = pack(stepper.update.counters(), "optimizer")
    return {"type": optimizer.name, "groups": saved_groups(optimizer, names.groups), "counters": counters}
