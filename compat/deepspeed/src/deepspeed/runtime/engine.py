"""The engine that libraries expect: zeroshard's, with the questions that they ask."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed._adalora import AdaptersBetweenSteps
from deepspeed._client_state import plain, restored
from deepspeed._exports import lazy
from zeroshard.engine.core.handle import Handle, find_handle, handle_of
from zeroshard.engine.engine import Engine
from zeroshard.engine.native import close
from zeroshard.engine.outside_step.gathered import iterate_full_parameters
from zeroshard.engine.saving.checkpoints import ClientState
from zeroshard.engine.saving.saved_model import persistent_buffers
from zeroshard.engine.step.attached import find_optimizer
from zeroshard.errors import UsageError, ZeroShardWarning
from zeroshard.sharding.dtensors import has_dtensors

__getattr__, __dir__ = lazy(__name__, {})

_SCRIPT = '''#!/usr/bin/env python
"""Write this folder's checkpoint as fp32 weights: python zero_to_fp32.py . OUTPUT_FOLDER"""

from zeroshard.checkpoint.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


def _put_script(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zero_to_fp32.py").write_text(_SCRIPT, encoding="utf-8")
    except OSError as error:  # the checkpoint is whole without it, and the other ranks go on
        warnings.warn(f"{error.filename} can't be written: {error.strerror}", ZeroShardWarning, stacklevel=3)


_ENGINE = "_zeroshard_deepspeed_engine"
"""On a model: a weak reference to the engine of this class that runs it."""


def leave(model: nn.Module) -> None:
    """Take the model, with its weights, from the engine of `deepspeed.initialize` that runs it."""
    known = vars(model).pop(_ENGINE, None)
    engine: DeepSpeedEngine | None = None if known is None else known()
    if engine is not None:
        engine.destroy()
    elif find_handle(model) is not None and (known is not None or find_optimizer(model) is None):
        close(model)


class DeepSpeedEngine(Engine):
    """zeroshard's engine as transformers, accelerate and Lightning call it.

    Attributes:
        divides_loss: whether `backward` divides the loss by the accumulation steps where its caller does not say.
    """

    divides_loss = True

    _raw: dict[str, Any]
    _own: Handle | None = None
    _adapters: AdaptersBetweenSteps | None = None

    def adopt(self, raw: dict[str, Any]) -> None:
        """Remember the config as it was given, and that the model is this engine's."""
        self._raw = raw
        self._own = handle_of(self.module)
        vars(self.module)[_ENGINE] = weakref.ref(self)

    def leave_division(self) -> None:
        """From now on the caller divides the loss by the accumulation steps, whichever way a backward is called."""
        self.divides_loss = False
        if self._backwards is not None:
            self._backwards.divides = False

    def adopt_adapters(self, adapters: AdaptersBetweenSteps) -> None:
        """From now on these adapters are there after each step."""
        self._adapters = adapters

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool | None = None
    ) -> torch.Tensor:
        """As zeroshard's; by default the loss is divided by the accumulation steps, unless the caller has done so."""
        return super().backward(loss, retain_graph, self.divides_loss if scale_wrt_gas is None else scale_wrt_gas)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """As zeroshard's; AdaLoRA's adapters and their gradients are there afterwards."""
        adapters, updates = self._adapters, self._batching.step_updates
        if adapters is None or not updates:
            super().step(lr_kwargs)
            return
        adapters.before_step()
        super().step(lr_kwargs)
        adapters.after_step(self._clipped())

    def _clipped(self) -> float:
        """What the last step multiplied the gradients with, to clip them."""
        norm, limit = self.get_global_grad_norm(), self.plan.policy.clip_norm
        return min(1.0, limit / (norm + 1e-6)) if limit > 0 and norm is not None and math.isfinite(norm) else 1.0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        self._rest()
        super().zero_grad(set_to_none)

    def destroy(self) -> None:
        """As zeroshard's; nothing where the model has gone on to another engine."""
        if self._adapters is not None:
            self._adapters.destroy()
            self._adapters = None
        if find_handle(self.module) in (None, self._own):
            super().destroy()

    @property
    def _handle(self) -> Handle:
        handle = super()._handle
        if self._own is not None and handle is not self._own:
            raise UsageError(
                f"another engine has taken over this {type(self.module).__name__} (deepspeed.initialize, or a Trainer "
                "or Accelerator, was given it again): train, step and save with that one"
            )
        return handle

    def _rest(self) -> None:
        if self._adapters is not None:
            self._adapters.close()

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given; not that of the model, which is `engine.module.config`."""
        return self._raw

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The embeddings whose gradients are reduced sparsely: none, every gradient is dense."""
        return set()

    @property
    def basic_optimizer(self) -> Any:
        """The optimizer that was passed to `initialize`; where the config names one, the engine's own."""
        return None if self.optimizer is None else vars(self.optimizer)["optimizer"]

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether whole weights may be put together on rank 0 for saving."""
        section = self._section("zero_optimization")
        older = section.get("stage3_gather_fp16_weights_on_model_save")
        return section.get("stage3_gather_16bit_weights_on_model_save", older) is True

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None before the first, or without an optimizer."""
        return None if self.optimizer is None else super().get_global_grad_norm()

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """torch.compile of the model, in place."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: ClientState = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        background: bool | None = None,
    ) -> bool:
        """As zeroshard's; zero_to_fp32.py is put beside it."""
        rank = self._handle.comm.mesh.rank
        self._rest()

        def state() -> Mapping[str, Any]:
            return plain((client_state() if callable(client_state) else client_state) or {})

        saved = super().save_checkpoint(
            save_dir, tag, state, save_latest, exclude_frozen_parameters, background=background
        )
        if rank == 0:
            _put_script(Path(save_dir))
        return saved

    def load_checkpoint(self, *args: Any, **options: Any) -> tuple[str | None, dict[str, Any] | None]:
        """As zeroshard's; tensors in the client state are tensors again."""
        self._handle.check_open()
        self._rest()
        path, client_state = super().load_checkpoint(*args, **options)
        return path, restored(client_state)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The model's state dict in compute dtype, on the CPU of rank 0; None on other ranks. Called by all ranks.

        Tied weights share their memory. Of a model whose ranks have parts of weights other ranks get an empty one:
        in place of None `save_pretrained` would put the parts together, and wait for rank 0.
        """
        self._rest()
        handle = handle_of(self.module)
        kept = handle.comm.mesh.rank == 0
        frozen = {
            segment.name
            for _, group in handle.plan.groups()
            if exclude_frozen_parameters and not group.trainable
            for segment in group.layout.segments
        }
        state: dict[str, torch.Tensor] = {}
        for name, value in iterate_full_parameters(self.module, master=False):
            if kept and name not in frozen:
                state[name] = value.clone()
        if not kept:
            return {} if has_dtensors(self.module) else None
        state |= {alias: state[name] for alias, name in handle.plan.aliases.items() if name in state}
        return state | {name: buffer.detach().cpu() for name, buffer in persistent_buffers(self.module).items()}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self._raw.get(name)
        return section if isinstance(section, Mapping) else {}
