"""Matrix products whose rows do not depend on each other's number or place.

A math library picks its kernel, and with it the order of the sum, by the shape of the whole product: the same row may
give other bits beside 7 others than beside 30. So rows are padded to a multiple of a base tile and every product is
done on tiles of that many rows, or of larger sizes that were seen to give the same bits as the base tile on this very
machine, for this very weight shape and thread count (`probe_tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILES = (256, 128, 96, 80, 64, 56, 48, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4)
_PACK_ROWS = 32  # oneDNN lays a packed weight out for about this many rows: a batch of decodes


class InvarianceError(Exception):
    """This machine's kernels do not keep rows apart even in fixed tiles: batch_invariant cannot be promised."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to multiply. `name` is part of the numerics class; `tile` is its base tile, 0 for none."""

    name: str
    tile: int
    pack: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def padded(self, rows: int) -> int:
        """Rows that a step is filled up to."""
        return -(-rows // self.tile) * self.tile if self.tile else rows


def _onednn_pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _onednn_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _mm_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.mm(x, packed)
    return out if bias is None else out.add_(bias)


# A weight packed once for oneDNN is half the time of BLAS up to some 64 rows. A single row takes another path there.
ONEDNN = Kernel("onednn-tile4", 4, _onednn_pack, _onednn_product)
# What every torch has. The transposed copy is faster than F.linear, which has it transposed by BLAS every time.
BLAS = Kernel("blas-tile16", 16, lambda weight: weight.t().contiguous(), _mm_product)
PLAIN = Kernel("linear", 0, lambda weight: weight, F.linear)


class TiledLinear:
    """`y = x W^T + b` over rows in fixed tiles; their number must be a multiple of the kernel's base tile."""

    def __init__(self, kernel: Kernel, weight: Tensor, bias: Tensor | None, tiles: tuple[int, ...]) -> None:
        self._kernel = kernel
        self._weight = kernel.pack(weight)
        self._bias = bias
        self._tiles = tiles
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self.bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        if not self._tiles or x.shape[0] in self._tiles:
            return self._kernel.product(x, self._weight, self._bias)
        return torch.cat([self._kernel.product(x[a:b], self._weight, self._bias) for a, b in self._cut(x.shape[0])])

    def _cut(self, rows: int) -> list[tuple[int, int]]:
        if rows not in self._cuts:
            self._cuts[rows] = cut_rows(rows, self._tiles)
        return self._cuts[rows]


def cut_rows(rows: int, tiles: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cover `[0, rows)` with tiles, largest first. `tiles` is descending and ends with the base tile."""
    if rows % tiles[-1]:
        raise ValueError(f"{rows} rows are not a multiple of {tiles[-1]}")
    cuts, start = [], 0
    while start < rows:
        size = next(tile for tile in tiles if tile <= rows - start)
        cuts.append((start, start + size))
        start += size
    return cuts


def choose_kernel(weights: Iterable[Tensor]) -> tuple[Kernel, dict[tuple[int, ...], tuple[int, ...]]]:
    """The first kernel that keeps rows apart for every weight (one of each shape), and its tiles by weight shape.

    Raises InvarianceError if there is none.
    """
    weights = list(weights)
    refusals = []
    for kernel in (ONEDNN, BLAS) if _has_onednn() else (BLAS,):
        try:
            return kernel, {tuple(w.shape): probe_tiles(kernel, w) for w in weights}
        except InvarianceError as error:
            refusals.append(str(error))
    raise InvarianceError("; ".join(refusals) + ": use another num_threads or set batch_invariant=False")


def probe_tiles(kernel: Kernel, weight: Tensor) -> tuple[int, ...]:
    """Which tile sizes give, on this machine, the very bits that the base tile gives. Raises InvarianceError.

    Random rows make it all but impossible for another order of summation to agree by chance in every element.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(TILES), weight.shape[1], generator=generator, dtype=weight.dtype)
    packed = kernel.pack(weight)
    expected = torch.cat([kernel.product(part, packed, None) for part in torch.split(rows, kernel.tile)])
    first = rows[: kernel.tile]
    for shift in (1, kernel.tile // 2 - 1):
        if not torch.equal(kernel.product(first.roll(shift, 0), packed, None), expected[: kernel.tile].roll(shift, 0)):
            raise InvarianceError(
                f"{kernel.name} gives a row other bits at another place of its tile, with a {tuple(weight.shape)} "
                f"weight and {torch.get_num_threads()} threads"
            )
    sizes = [size for size in TILES if size % kernel.tile == 0]
    return tuple(t for t in sizes if t == kernel.tile or _same(kernel, packed, rows[:t], expected[:t]))


def _same(kernel: Kernel, packed: Tensor, rows: Tensor, expected: Tensor) -> bool:
    return torch.equal(kernel.product(rows, packed, None), expected)


def _has_onednn() -> bool:
    """The operators that torch's own compiler uses for packed weights; builds without oneDNN lack them."""
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


_GRAIN = 32768
_VECTOR = 32


def rowwise_silu(rows: Tensor) -> Tensor:
    """SiLU in calls that stay below torch's parallel grain.

    A parallel call cuts the elements at places that depend on their number, and what is left over at a cut goes
    through scalar code with other bits than the vector code. Calls on whole rows below the grain have no such cuts;
    a row that is not a multiple of the vector width goes alone, so that its tail is always its own.
    """
    width = rows.shape[1]
    step = max(1, (_GRAIN - 1) // width) if width % _VECTOR == 0 else 1
    out = torch.empty(rows.shape, dtype=rows.dtype)
    for start in range(0, rows.shape[0], step):
        torch.ops.aten.silu.out(rows[start : start + step], out=out[start : start + step])
    return out
