"""State in few bits: 8-bit or 4-bit codes of one flat state tensor, with a float32 scale for each block of elements.

    elements   [ a a a a ... a | b b b b ... b | ... ]     a block: 256 elements (8 bits) or 128 (4 bits) by default
    codes      [ one or half a byte for each        ]
    scale      [ sa            | sb            | ... ]     the block's largest absolute value

The codes are those of torchao's optimizers, made and read by its own functions: a code is an index into a table of
values between -1 and 1, which are multiplied by the block's scale (Dettmers et al. 2021, arXiv:2110.02861, section 2;
4 bits: Li et al. 2023, arXiv:2309.01507). In the plan no block crosses a border of parameters or of shards, so a value
does not depend on the number of ranks. Rejected: a quantizer of our own, which would define the same numbers again.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.saved_state import PackedState, StoredValues
from zeroshard.plan.placement import Blocks

_CLASSES = {8: ("torchao.optim.subclass_8bit", "OptimState8bit"), 4: ("torchao.optim.subclass_4bit", "OptimState4bit")}


def require_torchao(bits: int, what: str) -> Any:
    """torchao's tensor class for state of so many bits.

    Raises:
        PlanError: torchao is not installed, or does not have the class.
    """
    module, name = _CLASSES[bits]
    try:
        return vars(import_module(module))[name]
    except (ImportError, KeyError) as error:
        raise PlanError(
            f"{what} keeps its moments in {bits} bits with torchao, which can't be used here ({error}): "
            "pip install torchao, or use AdamW, or Lion for less state"
        ) from None


class BlockedState:
    """One state tensor of `numel` elements, all zero.

    Args:
        signed: whether values may be negative.
        what: the optimizer, for messages.
    """

    def __init__(self, numel: int, blocks: Blocks, *, signed: bool, device: torch.device, what: str) -> None:
        self._kind = require_torchao(blocks.bits, what)
        self._blocks = blocks
        zeros = self._kind.zeros((numel,), signed, blocks.size, device)
        self._signed = signed
        self.codes: torch.Tensor = zeros.codes
        self.scale: torch.Tensor = zeros.scale
        self._table: torch.Tensor = zeros.qmap

    def read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) as new float32 values (high - low,); both ends are borders of blocks."""
        found: torch.Tensor = self._view(low, high).dequantize()
        return found

    def write(self, low: int, values: torch.Tensor) -> None:
        """Overwrite the elements from `low` on with float32 `values`, a multiple of whole blocks."""
        self._view(low, low + values.numel()).copy_(values)

    def packed(self, low: int, high: int) -> PackedState:
        """Elements [low, high) for checkpoints and for access by name."""
        return PackedState(
            read=lambda: self.read(low, high),
            write=lambda values: self.write(low, values),
            stored={
                "codes": StoredValues(self._codes(low, high), self.elements_per_code),
                "scale": StoredValues(self._scale(low, high), self._blocks.size),
            },
        )

    @property
    def elements_per_code(self) -> int:
        """Elements in a byte of codes."""
        return 8 // self._blocks.bits

    def zero(self) -> None:
        """Set all elements to 0."""
        self.codes.zero_()
        self.scale.zero_()

    def _codes(self, low: int, high: int) -> torch.Tensor:
        return self.codes[low // self.elements_per_code : high // self.elements_per_code]

    def _scale(self, low: int, high: int) -> torch.Tensor:
        return self.scale[low // self._blocks.size : high // self._blocks.size]

    def _view(self, low: int, high: int) -> Any:
        """torchao's tensor over a part of this one's memory."""
        shape = ((high - low,),) if self._blocks.bits == 4 else ()
        return self._kind(self._codes(low, high), self._scale(low, high), self._table, self._signed, *shape)
