"""The kernels of gradients do what their names say; on a GPU by Triton, elsewhere by their PyTorch twins.

`TRITON_INTERPRET=1` runs Triton's own on a CPU, where it is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from zeroshard.optim.kernels import rows as rows_module
from zeroshard.optim.kernels.norm import SquaredNorm
from zeroshard.optim.kernels.rows import SOURCES, OwnPiece, RowSum
from zeroshard.optim.kernels.tiles import BORDER, GRADIENT_TILE, TILE, tile_table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (GRADIENT_TILE * 2 + 100, 7, GRADIENT_TILE, 64, *(32 * n for n in range(1, 9)))
"""More gradients than one launch reads; whole tiles and ragged ones."""
RANKS, OWN = 3, 1


def _pieces() -> list[OwnPiece]:
    """One piece for each gradient, 128 apart; the first one begins amid its gradient."""
    found, low = [], 0
    for number, size in enumerate(SIZES):
        first = 128 if number == 0 else 0
        found.append(OwnPiece(number, first, low, low + size - first))
        low += -(-(size - first) // 128) * 128
    return found


def _gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in SIZES]


def _rows(dtype: torch.dtype) -> torch.Tensor:
    numel = -(-_pieces()[-1].high // 128) * 128
    return torch.randn(RANKS, numel, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_own_gradients_are_summed_in_the_order_of_ranks(dtype: torch.dtype, add: bool) -> None:
    pieces, gradients, rows = _pieces(), _gradients(dtype), _rows(dtype)
    assert len(pieces) > SOURCES
    total = RowSum(pieces, OWN, DEVICE)
    out = torch.full((rows.shape[1],), 3.0, device=DEVICE)
    before = out.clone()
    total(rows, out, own=gradients, add=add)
    for piece in pieces:
        cut = slice(piece.low, piece.high)
        own = gradients[piece.source][piece.first : piece.first + piece.high - piece.low]
        expected = rows[0, cut].float() + own.float() + rows[2, cut].float()
        assert torch.equal(out[cut], before[cut] + expected if add else expected)
        before[cut] = out[cut]
    assert torch.equal(out, before), "elements outside of the pieces were written"


def test_own_rows_give_the_sums_of_own_gradients() -> None:
    pieces, gradients, rows = _pieces(), _gradients(torch.bfloat16), _rows(torch.bfloat16)
    total, first, second = RowSum(pieces, OWN, DEVICE), rows[0].clone(), rows[0].clone()
    total(rows, first, own=gradients)
    for piece in pieces:
        rows[OWN, piece.low : piece.high] = gradients[piece.source][piece.first :]
    total(rows, second)
    assert torch.equal(first, second)


def test_squares_made_by_the_sum_have_the_bits_of_those_made_later() -> None:
    pieces, rows = _pieces(), _rows(torch.bfloat16)
    total, out = RowSum(pieces, OWN, DEVICE), torch.zeros(rows.shape[1], dtype=torch.bfloat16, device=DEVICE)
    beside, later = (SquaredNorm([[(piece.low, piece.high) for piece in pieces]], DEVICE) for _ in range(2))
    total(rows, out, own=_gradients(torch.bfloat16), squares=beside.partial(0))
    later.square(0, out)
    sums = [torch.zeros((), dtype=torch.float64, device=DEVICE) for _ in range(2)]
    beside.into(sums[0])
    later.into(sums[1])
    assert torch.equal(*sums)
    assert torch.equal(beside.partial(0), later.partial(0))
    assert float(sums[0]) == pytest.approx(float(sum(out[p.low : p.high].double().square().sum() for p in pieces)))


@pytest.mark.parametrize("start", [0, 7, BORDER - 1, 5 * BORDER, 1_000_003])
def test_whole_tiles_begin_where_a_kernel_may_move_16_bytes(start: int) -> None:
    end = start + 3 * TILE + 11
    tiles = tile_table([(4, start, end), (5, end, end + 3)], torch.device("cpu")).tolist()
    assert [low for low, _, _ in tiles] == [start, *(high for _, high, _ in tiles[:-1])]
    assert tiles[-1][1:] == [end + 3, 5]
    whole = [low for low, high, _ in tiles if high - low == TILE]
    assert len(whole) >= 2
    assert not any(low % BORDER for low in whole)


def test_tiles_reach_past_the_range_of_32_bits() -> None:
    low = 2**31 + 128
    assert tile_table([(1, low, low + TILE + 5)], torch.device("cpu")).tolist() == [
        [low, low + TILE, 1],
        [low + TILE, low + TILE + 5, 1],
    ]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 runs Triton on a CPU")
def test_the_interpreted_kernel_is_its_twin() -> None:
    from zeroshard.optim.kernels.rows_triton import row_sum

    pieces, gradients, rows = _pieces(), _gradients(torch.bfloat16), _rows(torch.bfloat16)
    total = RowSum(pieces, OWN, DEVICE)
    expected, out = torch.zeros(2, rows.shape[1])  # float32: the interpreter cuts bfloat16 off instead of rounding it
    squares = [torch.zeros(total.tiles, dtype=torch.float64) for _ in range(2)]
    total(rows, expected, own=gradients, squares=squares[0])
    for launch in total._launches:
        sources = [gradients[launch.sources[min(n, len(launch.sources) - 1)]] for n in range(SOURCES)]
        row_sum[(len(launch.tiles),)](
            *(*sources, rows, out, squares[1][launch.first :], launch.tiles, rows.shape[1]),
            RANKS=RANKS,
            OWN=OWN,
            ADD=False,
            SQUARE=True,
            TILE=GRADIENT_TILE,
        )
    assert torch.equal(out, expected)
    assert torch.allclose(*squares, rtol=1e-7)
    assert rows_module.SOURCES == 8, "row_sum has a parameter for each"
