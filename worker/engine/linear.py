"""Matrix products whose rows do not depend on each other's number or place.

A math library picks its kernel, and with it the order of the sum, by the shape of the whole product: the same row
gives other bits beside 7 others than beside 30. So rows are padded to a multiple of `ROW_TILE` and every product is
done on tiles of `ROW_TILE` rows, or of larger sizes that were seen to give the same bits as `ROW_TILE` on this very
machine, for this very weight shape and thread count (`probe_tiles`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROW_TILE = 16
CANDIDATE_TILES = (128, 96, 64, 48, 32, 16)


class InvarianceError(Exception):
    """This machine's kernels do not keep rows apart even in fixed tiles: batch_invariant cannot be promised."""


class TiledLinear(nn.Module):
    """`y = x W^T + b` over rows in fixed tiles. The number of rows must be a multiple of ROW_TILE."""

    def __init__(self, linear: nn.Linear, tiles: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.tiles = tiles
        self._cuts: dict[int, list[tuple[int, int]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape[0], self.weight.shape[0], dtype=x.dtype)
        for start, stop in self._cut(rows.shape[0]):
            # W on the left: at 16 to 64 rows the library is faster this way round than in F.linear
            out[start:stop] = torch.mm(self.weight, rows[start:stop].t()).t()
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        if rows not in self._cuts:
            self._cuts[rows] = cut_rows(rows, self.tiles)
        return self._cuts[rows]


def cut_rows(rows: int, tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cover `[0, rows)` with tiles, largest first. `tiles` is descending and ends with ROW_TILE."""
    if rows % ROW_TILE:
        raise ValueError(f"{rows} rows are not a multiple of {ROW_TILE}")
    cuts, start = [], 0
    while start < rows:
        size = next(tile for tile in tiles if tile <= rows - start)
        cuts.append((start, start + size))
        start += size
    return cuts


def probe_tiles(weight: Tensor) -> tuple[int, ...]:
    """Which tile sizes give, on this machine, the very bits that ROW_TILE gives. Raises InvarianceError.

    Random rows make it all but impossible for another order of summation to agree by chance in every element.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(CANDIDATE_TILES), weight.shape[1], generator=generator, dtype=weight.dtype)
    _check_places(weight, rows[:ROW_TILE])
    expected = torch.cat([_product(weight, part) for part in torch.split(rows, ROW_TILE)])
    return tuple(t for t in CANDIDATE_TILES if t == ROW_TILE or torch.equal(_product(weight, rows[:t]), expected[:t]))


def _check_places(weight: Tensor, rows: Tensor) -> None:
    expected = _product(weight, rows)
    for shift in (1, 7):
        if not torch.equal(_product(weight, rows.roll(shift, 0)), expected.roll(shift, 0)):
            raise InvarianceError(
                f"a product with a {tuple(weight.shape)} weight gives a row other bits at another place of its tile "
                f"with {torch.get_num_threads()} threads; use another num_threads or set batch_invariant=False"
            )


def _product(weight: Tensor, rows: Tensor) -> Tensor:
    return torch.mm(weight, rows.t()).t()


class RowwiseSiLU(nn.Module):
    """SiLU in calls that stay below torch's parallel grain.

    A parallel call cuts the elements at places that depend on their number, and what is left over at a cut goes
    through scalar code with other bits than the vector code. Calls on whole rows below the grain have no such cuts;
    a row that is not a multiple of the vector width goes alone, so that its tail is always its own.
    """

    GRAIN = 32768
    VECTOR = 32

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        step = max(1, (self.GRAIN - 1) // width) if width % self.VECTOR == 0 else 1
        out = torch.empty_like(rows)
        for start in range(0, rows.shape[0], step):
            torch.ops.aten.silu.out(rows[start : start + step], out=out[start : start + step])
        return out.view(x.shape)
