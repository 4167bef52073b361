"""deepspeed.accelerator: the device of this rank, asked in DeepSpeed's words."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from deepspeed._exports import lazy
from deepspeed._refusals import MissingNameError, refusal
from zeroshard.engine.build import default_device

__getattr__, __dir__ = lazy(__name__, {})


@dataclass(frozen=True)
class Accelerator:
    """The device kind that this process trains on: cuda where there is a GPU, else cpu."""

    kind: str

    def __getattr__(self, name: str) -> object:
        raise MissingNameError(refusal(f"deepspeed.accelerator.get_accelerator().{name}"), name=name, obj=self)

    @property
    def _name(self) -> str:
        return self.kind

    def device_name(self, device_index: int | str | None = None) -> str:
        return self.kind if device_index is None or self.kind == "cpu" else f"{self.kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int | str:
        return self.kind if self.kind == "cpu" else torch.cuda.current_device()

    def current_device_name(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{torch.cuda.current_device()}"

    def device_count(self) -> int:
        """The GPUs; of a processor as many as its launcher starts ranks here (LOCAL_SIZE is MPI's name for that)."""
        ranks = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        return int(ranks) if self.kind == "cpu" else torch.cuda.device_count()

    def set_device(self, device_index: int) -> None:
        if self.kind != "cpu":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "gloo" if self.kind == "cpu" else "nccl"

    def is_bf16_supported(self) -> bool:
        return self.kind == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self.kind != "cpu"

    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating dtypes in which a model may compute."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_synchronized_device(self) -> bool:
        """Whether calls return only when their work is done."""
        return self.kind == "cpu"

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state() if self.kind == "cpu" else torch.cuda.get_rng_state(self._index(device_index))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self.kind == "cpu":
            torch.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, self._index(device_index))

    def initial_seed(self) -> int:
        return torch.initial_seed() if self.kind == "cpu" else torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator if self.kind == "cpu" else torch.cuda.default_generators[device_index]

    def memory_reserved(self, device_index: int | None = None) -> int:
        return 0 if self.kind == "cpu" else torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return 0 if self.kind == "cpu" else torch.cuda.max_memory_reserved(device_index)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.kind == "cpu" else tensor.pin_memory()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.kind

    def _index(self, device_index: int | None) -> int:
        return torch.cuda.current_device() if device_index is None else device_index

    def synchronize(self, device_index: int | None = None) -> None:
        if self.kind != "cpu":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self.kind != "cpu":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self.kind == "cpu" else torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self.kind == "cpu" else torch.cuda.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self.kind != "cpu":
            torch.cuda.reset_peak_memory_stats(device_index)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed) if self.kind == "cpu" else torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed) if self.kind == "cpu" else torch.cuda.manual_seed_all(seed)


def is_current_accelerator_supported() -> bool:
    """Whether zeroshard trains on this machine's device, which it does on CPUs and on CUDA's."""
    return True


def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator(default_device().type)
