"""Products whose rows have the same bits whatever rows are beside them, and however many threads compute.

A library chooses its way by the shape of a product and the number of threads. Whether two ways add up a row in the
same order is found out, not assumed: each product has tiles of a few rows, computed by one thread, that say which
bits a row has. What is computed faster, with more rows or threads, is compared with them in full when it is needed
for the first time. What differs is computed by one thread from then on, and if that differs too, in those tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prefillcli.errors import ResourceError

TILE_ROWS = {"cpu": 64}  # whose bits count; on CPUs few, as they are computed by one thread
TILE_ROWS_ELSEWHERE = 256
FEW_ROWS = 16  # on CPUs the number of rows is rounded up to a multiple of this below a tile, and of a tile above

Product = Callable[..., Tensor]
"""Takes one tensor or several [..., rows, inputs], and gives [..., rows, outputs]."""


class RowProducts:
    """Products of rows with weights, and what has been found out about them.

    Which way a product is computed depends on what agrees on this machine; which bits a row has does not.
    """

    def __init__(self) -> None:
        self._most_threads: dict[tuple[Hashable, int, int], int] = {}
        self._tiled: set[Hashable] = set()  # kinds whose tiles do not depend on a row's place

    def compute(self, kind: Hashable, product: Product, *rows: Tensor, reference: Product | None = None) -> Tensor:
        """`product(*rows)`, for rows that may have any number.

        `kind` says all that a library may choose a way by, beside the number of rows: operation, dtype, shapes and
        strides. `reference` computes the same with weights that are not laid out for this product. Raises
        ResourceError if not even tiles of one shape give a row the same bits at each place.
        """
        count = rows[0].shape[-2]
        if not count:
            return product(*rows)
        padded = tuple(_padded(each, _rounded(count, each.device)) for each in rows)
        size, threads = padded[0].shape[-2], torch.get_num_threads()
        asked = kind, size, threads
        if asked not in self._most_threads:
            self._most_threads[asked] = self._found_out(kind, product, padded, reference or product)
        most = self._most_threads[asked]
        if most == threads:
            found = product(*padded)
        elif most:
            with _threads(most):
                found = product(*padded)
        else:
            found = _in_tiles(reference or product, padded)
        return found[..., :count, :]

    def _found_out(self, kind: Hashable, product: Product, rows: tuple[Tensor, ...], reference: Product) -> int:
        """With how many threads the product of so many rows has the bits of its tiles; 0 if with none."""
        rows = tuple(map(_random_like, rows))  # given ones may be few, and zeros below them show nothing
        if kind not in self._tiled:
            _check_tiles(reference, rows)
            self._tiled.add(kind)
        wanted, threads = _in_tiles(reference, rows), torch.get_num_threads()
        for tried in sorted({threads, 1}, reverse=True):
            with _threads(tried):
                if _same_bits(product(*rows), wanted):
                    return tried
        return 0


def _random_like(rows: Tensor) -> Tensor:
    drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(rows.device, rows.dtype)


def _rounded(count: int, device: torch.device) -> int:
    tile = tile_rows(device)
    step = FEW_ROWS if device.type == "cpu" and count < tile else tile
    return -(-count // step) * step


def tile_rows(device: torch.device) -> int:
    """The number of rows whose product says which bits they have. More rows are rounded up to a multiple of it."""
    return TILE_ROWS.get(device.type, TILE_ROWS_ELSEWHERE)


def _padded(rows: Tensor, count: int) -> Tensor:
    """The rows and some below, `count` of them, contiguous.

    Those below are what lies there in memory, mostly the rest of another product, or zeros: no row depends on them.
    """
    given, size = rows.shape[-2], (*rows.shape[:-2], count, rows.shape[-1])
    if given == count:
        return rows.contiguous()
    end = rows.storage_offset() + count * rows.shape[-1]
    if rows.dim() == 2 and rows.is_contiguous() and end * rows.itemsize <= rows.untyped_storage().nbytes():
        return rows.as_strided(size, rows.stride())
    found = rows.new_empty(size)
    found[..., :given, :] = rows
    found[..., given:, :] = 0
    return found


def _tiles(rows: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    size = tile_rows(rows[0].device)
    for start in range(0, rows[0].shape[-2], size):
        yield tuple(_padded(each[..., start : start + size, :], size) for each in rows)


def _in_tiles(product: Product, rows: tuple[Tensor, ...]) -> Tensor:
    """The product by one thread in tiles of one shape: what its bits are."""
    with _threads(1):
        found = torch.cat([product(*tile) for tile in _tiles(rows)], dim=-2)
    return found[..., : rows[0].shape[-2], :]


def _check_tiles(product: Product, rows: tuple[Tensor, ...]) -> None:
    """Raise ResourceError unless rows keep their bits where they move within a tile."""
    shape = (*rows[0].shape[:-2], tile_rows(rows[0].device))
    tile = tuple(_random_like(each.new_empty(*shape, each.shape[-1])) for each in rows)
    with _threads(1):
        wanted = product(*tile)
        for by in (1, 13):
            moved = product(*(each.roll(by, dims=-2) for each in tile))
            if not _same_bits(moved.roll(-by, dims=-2), wanted):
                raise ResourceError(
                    "--deterministic: on this machine a matrix product gives a row other bits at another place\n"
                    "take another --device or --dtype, or leave it out"
                )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """While this lasts, so many threads compute."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
