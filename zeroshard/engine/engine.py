"""The engine that `initialize` returns: the training loop (training_engine.py) and checkpoints, with DeepSpeed's calls.

engine.save_checkpoint(folder)       save everything that is needed to continue
engine.resume(folder)                load the newest checkpoint, if there is one
engine.save_on_sigterm(folder)       save after the running step when SIGTERM arrives, and end

Rejected: one class for loop and checkpoints, which would be too long to read.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from zeroshard.elastic.session import Session
from zeroshard.engine.core.handle import handle_of
from zeroshard.engine.native import abandon, close
from zeroshard.engine.observing import Disk, Observer
from zeroshard.engine.saving import checkpoints
from zeroshard.engine.saving.held_load import load_held
from zeroshard.engine.saving.holding import Holding
from zeroshard.engine.saving.leaving import Leaving
from zeroshard.engine.saving.preemption import PREEMPTED, Preemption
from zeroshard.engine.saving.tags import agreed_tag
from zeroshard.engine.saving.weights_file import save_16bit_model
from zeroshard.engine.step.attached import stepper_of
from zeroshard.engine.training_engine import TrainingEngine
from zeroshard.errors import CheckpointError, SpillError, UsageError, ZeroShardError, ZeroShardWarning

_LOGGER = logging.getLogger("zeroshard")


@dataclass(frozen=True)
class _OnSigterm:
    """What `save_on_sigterm` was given: where to save, and the function that returns the client state."""

    preemption: Preemption
    directory: Path
    client_state: Callable[[], Mapping[str, Any]] | None


class Engine(TrainingEngine):
    """Trains a sharded model, and saves and loads it, with DeepSpeed's calls."""

    _on_sigterm: _OnSigterm | None = None
    _leaving: Leaving | None = None
    _holding: Holding | None = None
    _session: Session | None = None
    _client_state: checkpoints.ClientState = None

    def end_step(self) -> None:
        """As `TrainingEngine.end_step`; a run that was told to stop saves and ends."""
        super().end_step()
        if self._on_sigterm is not None and self._on_sigterm.preemption.due():
            self._save_and_end(self._on_sigterm)
        if self._leaving is not None:
            self._after_step(self._leaving)

    def join(self, session: Session, every: int) -> None:
        """Train in a round of an elastic job: leave it when the ranks change. Called by all ranks.

        Args:
            every: number of steps between two copies of the state in the nodes' memory; 0 for none.

        Raises:
            UsageError: another engine trains in this round.
        """
        session.register_engine(self, handle_of(self.module).comm.made())
        self._session = session
        self._leaving = Leaving(self.module, session)
        self._holding = Holding(self.module, session, every) if every else None
        session.on_end(self._abandon)

    def keep_client_state(self, client_state: Callable[[], Mapping[str, Any]]) -> None:
        """In an elastic job, keep what `client_state` returns with the state in memory; `resume` returns it."""
        self._client_state = client_state

    def _after_step(self, leaving: Leaving) -> None:
        leaves, holding = leaving.due(self.global_steps), self._holding
        if holding is not None and (leaves or holding.due(self.global_steps)):
            self._finish_last_step("step")
            holding.hold(
                self.global_steps,
                scheduler=self.lr_scheduler,
                client_state=self._client_state,
                counters=self._counters(),
                patient=leaves,
            )
        if leaves:
            leaving.leave()

    def _abandon(self) -> None:
        """Close the engine without the other ranks, because the ranks of the job have changed."""
        if self._on_sigterm is not None:
            self._on_sigterm.preemption.close(patient=False)
            self._on_sigterm = None
        if self._leaving is not None:
            self._leaving.close(patient=False)
            self._leaving = None
        self._stop_holding()
        if self._observer is not None:
            self._observer.close()
        abandon(self.module)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: checkpoints.ClientState = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        background: bool | None = None,
    ) -> bool:
        """Save everything that is needed to continue; called by all ranks.

        Args:
            tag: folder name; by default `global_step<N>`. Where the ranks' differ, rank 0's counts, and
                `checkpoint.tag_validation` of the config says whether that is an error, a warning or neither.
            client_state: plain values that `load_checkpoint` gives back, or a function that gives them.
            save_latest: make it the one that `load_checkpoint` without a tag loads.
            exclude_frozen_parameters: leave out frozen parameters, for example the base of a LoRA model.
            background: write in a thread while training goes on; by default as `checkpoint.async` of the config says.

        Returns:
            Whether it succeeded; False only where `checkpoint.on_failure` of the config is "warn".

        Raises:
            CheckpointError: it can't be written, here or on another rank; the older ones are untouched. In the
                background, the error comes from the next save, load or `wait_for_checkpoint`.
        """
        self._finish_last_step("save_checkpoint")
        save = partial(self._save, save_dir, tag, client_state, save_latest, exclude_frozen_parameters, background)
        with self._observed_disk("save"):
            if self._options.saving.raises:
                save()
                return True
            # An error of the last background save appears here; it must not prevent this save.
            return all([self._succeeds(self.wait_for_checkpoint), self._succeeds(save)])

    def _succeeds(self, save: Callable[[], object]) -> bool:
        """Whether a save, or the wait for one, succeeded; rank 0 logs a failure, which is the same on all ranks."""
        try:
            save()
        except (CheckpointError, SpillError) as error:
            if self._handle.comm.rank == 0:
                _LOGGER.error("training goes on without this checkpoint: %s", error)
            return False
        return True

    def _save(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None,
        client_state: checkpoints.ClientState,
        save_latest: bool,
        exclude_frozen_parameters: bool,
        background: bool | None,
    ) -> None:
        checkpoints.save(
            self.module,
            save_dir,
            self._agreed_tag(tag if tag is not None else f"global_step{self.global_steps}"),
            scheduler=self.lr_scheduler,
            client_state=client_state,
            background=self._options.saving.background if background is None else background,
            latest=save_latest,
            keep=self._options.saving.keep,
            frozen=not exclude_frozen_parameters,
            encryption_key=self._options.saving.encryption_key,
            audit=self._options.saving.audit,
            remote=self._options.saving.remote,
            signing_key=self._options.saving.signing_key,
            counters=self._counters(),
        )

    def _counters(self) -> dict[str, Any]:
        """The counters that a checkpoint has."""
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "skipped_steps": self.skipped_steps,
            "global_samples": self.global_samples,
            "accumulation": self._batching.sizes.accumulation,
            "train_batch": self._batching.sizes.train,
            "data": self._data.saved(),
        }

    def _observed_disk(self, what: Disk, left_out: Sequence[str] = ()) -> AbstractContextManager[None]:
        return nullcontext() if self._observer is None else self._observer.disk(what, left_out)

    def _agreed_tag(self, tag: str) -> str:
        barrier = checkpoints.saver_of(self._handle).barrier()
        return agreed_tag(barrier, tag, self._options.saving.tag_validation)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in the background is complete. Raises CheckpointError if it failed."""
        checkpoints.wait_for_checkpoint(self.module)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of the same model, saved with any number of ranks, stage and dtype; called by all ranks.

        Args:
            tag: None for the newest.
            load_module_strict: whether missing and unexpected names are errors; else they are warnings.
            load_optimizer_states: with the optimizer's state, hyper-parameters and the loss scale.
            load_lr_scheduler_states: with the scheduler's.
            load_module_only: load only parameters and buffers.

        Returns:
            The checkpoint's folder and the client state; (None, None) with a warning if no tag was given and the
            directory has no checkpoint.

        Raises:
            CheckpointError: it is damaged or of another model; nothing was changed.
        """
        if custom_load_fn is not None:
            raise UsageError("load_checkpoint(custom_load_fn=...): weights are not read as a dict here; not supported")
        self._finish_last_step("load_checkpoint")
        if tag is None and not checkpoints.any_checkpoint(self.module, load_dir):
            warnings.warn(f"{load_dir} holds no checkpoint; nothing was loaded", ZeroShardWarning, stacklevel=2)
            return None, None
        selection = checkpoints.Selection(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            strict=load_module_strict,
        )
        with self._observed_disk("load", selection.left_out):
            loaded = checkpoints.load(
                self.module,
                load_dir,
                tag,
                scheduler=self.lr_scheduler,
                selection=selection,
                encryption_key=self._options.saving.encryption_key,
                signed_by=self._options.saving.signed_by,
            )
        if selection.progress and loaded.counters:
            self._count_from(loaded.counters)
        return str(loaded.folder), loaded.client_state

    def save_on_sigterm(
        self,
        save_dir: str | os.PathLike[str],
        client_state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """From now on SIGTERM to any rank saves after the running step and ends all ranks; called by all ranks.

        `step()` raises SystemExit with status `zeroshard.PREEMPTED` then. `client_state` is called for what is saved as
        such. `checkpoint.directory` of the config does the same.
        """
        directory = checkpoints.checked_directory(save_dir)
        if self._on_sigterm is not None:
            self._on_sigterm.preemption.close()
        self._on_sigterm = _OnSigterm(Preemption(self.module), directory, client_state)

    def _save_and_end(self, on_sigterm: _OnSigterm) -> NoReturn:
        saved = self.save_checkpoint(on_sigterm.directory, client_state=on_sigterm.client_state, background=False)
        self.destroy()
        raise SystemExit(PREEMPTED if saved else 1)

    def resume(self, load_dir: str | os.PathLike[str] | None = None) -> tuple[str | None, dict[str, Any] | None]:
        """Continue from the newest checkpoint if there is one, with any number of ranks; called by all ranks.

        It is searched in `load_dir`, by default `checkpoint.directory` of the config; in an elastic job, first in the
        memory of its nodes.

        Returns:
            The checkpoint's folder and the client state; (None, None) if there is none yet.

        Raises:
            CheckpointError: as `load_checkpoint`.
        """
        directory = self._options.saving.directory if load_dir is None else load_dir
        if self._session is not None:
            loaded = load_held(self.module, self._session.place, self.lr_scheduler, self._saved_steps(directory))
            if loaded is not None:
                self._count_from(loaded.counters)
                return str(loaded.folder), loaded.client_state
            if directory is None:
                return None, None
        if directory is None:
            raise UsageError("resume: give the directory, or checkpoint.directory in the config")
        remote = self._options.saving.remote
        if not checkpoints.any_checkpoint(self.module, directory) and remote is not None:
            checkpoints.fetch_newest(self.module, remote, directory)
        if not checkpoints.any_checkpoint(self.module, directory):
            return None, None
        return self.load_checkpoint(directory)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in compute dtype to one file, streaming; called by all ranks.

        Args:
            save_filename: one that ends in .safetensors becomes such a file, any other one a file of `torch.save`.

        Raises:
            CheckpointError: it can't be written; on all ranks.
        """
        save_16bit_model(self.module, save_dir, save_filename, frozen=not exclude_frozen_parameters)
        return True

    def _count_from(self, counters: Mapping[str, Any]) -> None:
        self.global_steps, self.skipped_steps = counters["global_steps"], counters["skipped_steps"]
        self.global_samples = counters.get("global_samples", self.global_steps * counters.get("train_batch", 0))
        accumulation = self._batching.sizes.accumulation
        same = counters["accumulation"] == accumulation
        # With another accumulation the next micro-batch is the first of a step.
        self.micro_steps = counters["micro_steps"] if same else self.global_steps * accumulation
        self._batching.since_step = 0  # the gradients of a step that was not made are not saved
        self._data.load(counters.get("data", []))
        self._batching.compare(counters.get("train_batch"))

    def _saved_steps(self, directory: str | os.PathLike[str] | None) -> int:
        """The steps of the newest checkpoint on disk; 0 if this process took part in a later step itself."""
        assert self._session is not None
        if self._session.most_steps or directory is None:
            return 0
        return checkpoints.newest_steps(checkpoints.checked_directory(directory))

    def _stop_holding(self) -> None:
        if self._holding is not None:
            self._holding.close()
            self._holding = None

    def _finish_last_step(self, call: str) -> None:
        if self.optimizer is not None:
            self._stepper(call)
            self.count_outcome()

    def destroy(self) -> None:
        """Remove the hooks from the model, stop the watchdog, and restore the former handler of SIGTERM."""
        if self._on_sigterm is not None:
            self._on_sigterm.preemption.close()
            self._on_sigterm = None
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None
        if self._holding is not None:
            self._holding.finish()
        self._stop_holding()
        if self._observer is not None:
            self._report_last_step(self._observer)
        close(self.module)

    def _report_last_step(self, observer: Observer) -> None:
        """Report the last step to the observer if its outcome is known; errors of that step are ignored here."""
        with suppress(ZeroShardError):
            if self.optimizer is not None and stepper_of(self.module).outcome_known:
                self.count_outcome()
        observer.close()
