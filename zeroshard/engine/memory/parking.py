"""Moves state to host memory for a while and frees its memory on the device (`offload_states`, `reload_states`).

    offload    storage --copy--> host bytes;   storage resized to nothing      tensors and their views stay as they are
    reload     storage resized to its size;    host bytes --copy--> storage

The tensors stay the same objects for the optimizer, views and kernels; only their addresses change. Rejected: new
tensors, which every user of the old ones would have to pick up.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch

from zeroshard.errors import UsageError


class Parkable(str, Enum):
    """The kinds of state that can be moved to host memory; the values are DeepSpeed's names."""

    OPTIM_STATES = "optim_states"
    HP_PARAMS = "hp_params"
    LP_PARAMS = "lp_params"
    LP_GRADS = "lp_grads"


class Parking:
    """The state that is in host memory at present."""

    def __init__(self) -> None:
        self._host_copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self.kinds: frozenset[Parkable] = frozenset()
        self.reloads = 0
        """How many times state was reloaded, each time to new addresses."""

    def refuse(self, what: str, *kinds: Parkable) -> None:
        """Raises UsageError if `what` needs state that is in host memory: any of `kinds`, by default of all kinds."""
        moved = self.kinds & frozenset(kinds) if kinds else self.kinds
        if moved:
            names = ", ".join(sorted(kind.value for kind in moved))
            raise UsageError(
                f"{what} needs state that offload_states() moved to host memory ({names}); call reload_states() first"
            )

    def park(self, kind: Parkable, tensors: Iterable[torch.Tensor], *, pin_memory: bool) -> int:
        """Move the storages of `tensors` to host memory; storages that can't be resized stay. Returns the bytes moved.

        Compute must have finished with them. The copies are complete when this returns.
        """
        moved = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable() or not storage.nbytes():
                continue
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory and tensor.is_cuda)
            copy.copy_(_bytes(storage, tensor.device))
            storage.resize_(0)
            self._host_copies.append((storage, copy))
            moved += copy.nbytes
        self.kinds |= {kind}
        return moved

    def reload(self) -> int:
        """Bring everything back; returns the bytes moved."""
        moved = 0
        for storage, copy in self._host_copies:
            storage.resize_(copy.nbytes)
            _bytes(storage, storage.device).copy_(copy)
            moved += copy.nbytes
        self.reloads += bool(self._host_copies)
        self._host_copies.clear()
        self.kinds = frozenset()
        return moved


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
