"""A linear layer in tiles, so that a layer too large to be gathered whole is gathered tile by tile.

                  in 0     in 1
        out 0   [ tile ] [ tile ]        y[out i] = sum over j of x[in j] @ tile[i][j]^T, bias in the last tile
        out 1   [ tile ] [ tile ]

Outside of repeated blocks each tile is a unit of its own. Inside of a block the whole block is gathered at once, unless
`shard(..., units=[...])` names the tiles. The parameters have the names of DeepSpeed's tiles, so that its checkpoints
can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zeroshard.arguments import need_kind
from zeroshard.errors import TilingError, UsageError


class TiledLinear(nn.Module):
    """A linear layer of `in_features` x `out_features`, computed in tiles.

    Args:
        in_splits, out_splits: tiles along the input and the output; sizes differ by at most one.
        input_is_already_split: forward takes a list of `in_splits` tensors.
        combine_out_splits: False returns a list of `out_splits` tensors.
        linear_cls: makes a tile: `linear_cls(in_features, out_features, bias=..., **kwargs)`.
        init_linear: a linear layer whose weight and bias are copied.

    Attributes:
        linears: the tiles, `linears[out][in]`.
        in_parts, out_parts: where the tiles begin along the input and the output, and where the last one ends.

    Raises:
        TilingError: more splits than features, or fewer than one.
        UsageError: `init_linear` has another shape, or only one of the two has a bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for number in (in_features, out_features, in_splits, out_splits):
            need_kind(number, int, "TiledLinear", "a whole number of features and of splits")
        for name, splits, features in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise TilingError(f"TiledLinear: {name} {splits} must be from 1 to the {features} features")
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _sizes(in_features, in_splits), _sizes(out_features, out_splits)
        self.in_parts, self.out_parts = _ends(self.in_sizes), _ends(self.out_sizes)
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(i, o, bias=bias and n == last, **kwargs) for n, i in enumerate(self.in_sizes))
            for o in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """From (..., in_features), or a list of its parts, to (..., out_features), or a list of its parts."""
        outputs = [total if bias is None else total + bias for total, bias in self._rows(x)]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias of a linear layer; before sharding, or inside GatheredParameters of both layers.

        Raises:
            UsageError: it has another shape, or only one of the two has a bias.
        """
        need_kind(other, nn.Module, "TiledLinear.copy_params_from", "a linear layer")
        shape = (self.out_features, self.in_features)
        own_bias = self._tile(0, -1).bias
        if tuple(other.weight.shape) != shape or (other.bias is None) != (own_bias is None):
            has = "without" if other.bias is None else "with"
            raise UsageError(
                f"TiledLinear.copy_params_from: a layer of shape {tuple(other.weight.shape)} {has} bias does not fit "
                f"into one of shape {shape}; make both alike"
            )
        with torch.no_grad():
            for row, weights in enumerate(other.weight.split(self.out_sizes, dim=0)):
                for column, weight in enumerate(weights.split(self.in_sizes, dim=1)):
                    self._tile(row, column).weight.copy_(weight)
            if other.bias is not None:
                for row, bias in enumerate(other.bias.split(self.out_sizes)):
                    self._tile(row, -1).bias.copy_(bias)

    def _rows(self, x: torch.Tensor | Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each part of the output, and its bias if the tiles return the bias instead of adding it."""
        parts = self._parts(x)
        rows: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for row in range(self.out_splits):
            total, bias = _output_and_bias(self._tile(row, 0)(parts[0]))
            for column in range(1, self.in_splits):
                output, further = _output_and_bias(self._tile(row, column)(parts[column]))
                total = total + output
                bias = further if bias is None else bias
            rows.append((total, bias))
        return rows

    def _tile(self, row: int, column: int) -> Any:
        rows = self.linears[row]
        assert isinstance(rows, nn.ModuleList)
        return rows[column]

    def _parts(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not self.input_is_already_split:
            if not isinstance(x, torch.Tensor):
                raise UsageError("TiledLinear: a tensor is needed; pass input_is_already_split=True for parts of one")
            if not x.dim() or x.shape[-1] != self.in_features:
                raise UsageError(f"TiledLinear: an input of shape {tuple(x.shape)} has no {self.in_features} features")
            return x.split(self.in_sizes, dim=-1)
        if isinstance(x, torch.Tensor) or len(x) != self.in_splits:
            raise UsageError(f"TiledLinear: input_is_already_split needs a list of {self.in_splits} tensors")
        return x


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of layers that return (output without bias, bias), as Megatron's do.

    Its forward returns the same pair, each in parts with `combine_out_splits=False`; the bias is None if the layers
    have none.
    """

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """From (..., in_features), or a list of its parts, to (..., out_features) and the bias, or lists of parts."""
        rows = self._rows(x)
        outputs, biases = [total for total, _ in rows], [bias for _, bias in rows if bias is not None]
        if not self.combine_out_splits:
            return outputs, biases or None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if biases else None


def _output_and_bias(result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return result if isinstance(result, tuple) else (result, None)


def _ends(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _sizes(features: int, splits: int) -> list[int]:
    """Sizes that differ by at most one, the larger ones first."""
    ends = list(accumulate((features - part + splits - 1) // splits for part in range(splits)))
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
