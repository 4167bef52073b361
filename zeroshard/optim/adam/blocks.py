"""State in few bits: 8-bit or 4-bit codes of one flat state tensor, with a float32 scale for each block of elements.

    elements   [ a a a a ... a | b b b b ... b | ... ]     a block: 256 elements (8 bits) or 128 (4 bits) by default
    codes      [ one or half a byte for each        ]
    scale      [ sa            | sb            | ... ]     the block's largest absolute value

The codes are those of torchao's optimizers: a code is an index into its table of values between -1 and 1, which are
multiplied by the block's scale (Dettmers et al. 2021, arXiv:2110.02861, section 2; 4 bits: Li et al. 2023,
arXiv:2309.01507). In the plan no block crosses a border of parameters or of shards, so a value does not depend on the
number of ranks. torchao's own functions make and read codes of 4 bits, and read those of 8. Those of 8 bits are found
in its table by one search per element, to the same codes: torchao's takes some 50 operations on 8-byte integers, which
is what an update would spend its time on. Rejected: a table of our own, which would define the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from zeroshard.errors import PlanError
from zeroshard.optim.saved_state import PackedState, StoredValues
from zeroshard.plan.placement import Blocks
from zeroshard.tiers import Row, RowInPlace, RowPart, clear, loaded, store

_LEAST_SCALE = 1e-12
"""torchao's, for blocks of zeros."""
_BELOW_ALL = -2.0
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


def half_gaps(table: torch.Tensor) -> torch.Tensor:
    """How far above each value of a sorted table the next code begins; 0 for the last."""
    return (torch.cat((table[1:], table[-1:])) - table) * 0.5


def encode_8_bits(
    values: torch.Tensor, table: torch.Tensor, halves: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write the codes and scales that torchao makes of float32 `values` (n,), whole blocks; `halves` is `half_gaps`."""
    blocks = values.view(len(scale), -1)
    torch.amax(blocks.abs(), -1, out=scale)
    scale.clamp_(min=_LEAST_SCALE)
    shares = (blocks / scale.view(-1, 1)).view(-1)
    # The last code whose value is not above the share; that of NaN is the first, as in torchao.
    below = torch.bucketize(shares.nan_to_num(nan=_BELOW_ALL), table, right=True, out_int32=True)
    below.sub_(1).clamp_(min=0)
    above = shares.sub_(table[below]) >= halves[below]
    codes.copy_(below.add_(above).clamp_(max=len(table) - 1))


class BlockedState:
    """One state tensor of `numel` elements, all zero.

    Args:
        signed: whether values may be negative.
        device: where codes are made and read; where they rest, too, without `allocate`.
        what: the optimizer, for messages.
        allocate: allocates the rows of codes and of scales, where these rest off the device.
    """

    def __init__(
        self,
        numel: int,
        blocks: Blocks,
        *,
        signed: bool,
        device: torch.device,
        what: str,
        allocate: Callable[[int, torch.dtype], Row] | None = None,
    ) -> None:
        self._kind = require_torchao(blocks.bits, what)
        self._blocks, self._signed = blocks, signed
        self._table: torch.Tensor = self._kind.zeros((blocks.size,), signed, blocks.size, device).qmap
        self._halves = half_gaps(self._table)
        new = allocate or (lambda count, dtype: RowInPlace(torch.zeros(count, dtype=dtype, device=device)))
        self.codes = new(blocks.code_nbytes(numel), torch.uint8)
        self.scale = new(numel // blocks.size, torch.float32)

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The float32 values of whole blocks of codes on the device."""
        found: torch.Tensor = self._view(codes, scale).dequantize()
        return found

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Write codes and scales of float32 `values`, whole blocks, all on the device."""
        if self._blocks.bits == 8:
            encode_8_bits(values, self._table, self._halves, codes, scale)
        else:
            self._view(codes, scale).copy_(values)

    def packed(self, low: int, high: int) -> PackedState:
        """Elements [low, high) for checkpoints and for access by name; both ends are borders of blocks."""
        return PackedState(
            read=lambda: self._read(low, high),
            write=lambda values: self._write(low, values),
            stored={
                "codes": StoredValues(RowPart(self.codes, *self._range(low, high, "codes")), self.per_code),
                "scale": StoredValues(RowPart(self.scale, *self._range(low, high, "scale")), self._blocks.size),
            },
        )

    @property
    def per_code(self) -> int:
        """Elements in a byte of codes."""
        return 8 // self._blocks.bits

    def zero(self) -> None:
        """Set all elements to 0."""
        clear(self.codes)
        clear(self.scale)

    def _read(self, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) as new float32 values (high - low,)."""
        codes, scale = (loaded(row, slice(*self._range(low, high, name))) for name, row in self._rows())
        return self.decode(codes.to(self._table.device), scale.to(self._table.device))

    def _write(self, low: int, values: torch.Tensor) -> None:
        """Overwrite the elements from `low` on with float32 `values`, whole blocks."""
        device, high = self._table.device, low + values.numel()
        codes = torch.empty(self._blocks.code_nbytes(values.numel()), dtype=torch.uint8, device=device)
        scale = torch.empty(values.numel() // self._blocks.size, dtype=torch.float32, device=device)
        self.encode(values.to(device), codes, scale)
        for (name, row), new in zip(self._rows(), (codes, scale), strict=True):
            store(row, slice(*self._range(low, high, name)), new)

    def _rows(self) -> tuple[tuple[str, Row], tuple[str, Row]]:
        return ("codes", self.codes), ("scale", self.scale)

    def _range(self, low: int, high: int, name: str) -> tuple[int, int]:
        """The elements [low, high) in one of the rows."""
        per = self.per_code if name == "codes" else self._blocks.size
        return low // per, high // per

    def _view(self, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        """torchao's tensor over this memory."""
        shape = ((codes.numel() * 2,),) if self._blocks.bits == 4 else ()
        return self._kind(codes, scale, self._table, self._signed, *shape)
