"""The memory in which one tile is updated: rows of fp32 over one buffer of the arena, and the dither of a rounding.

Dither makes rounding to 8 bits right on average: a random number per element, the hash of the parameter, the step and
the element's position. So dither is the same whatever the tiles, buckets or budget, and after a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["Dither", "TileRows", "TileScratch"]

_SMALL_NUMEL = 1 << 17
"""Elements of a tile whose moments are decoded: six rows of fp32 for it are 3 MiB, two cores' L2 and a little."""

_PERIOD = 4096  # elements after which the dither of a step repeats
_MASK = 0xFFFFFFFF
_SHIFTS = (0, 7, 12)  # of the streams: their numbers are bits of one hash
_ALL = (32, 0)  # the kind of row 0 that is the hash itself


class TileRows(NamedTuple):
    """Scratch for one tile, (numel,) fp32 each; ``spare`` has two rows more in a small tile and none in a large one."""

    master: torch.Tensor
    gradient: torch.Tensor
    work: torch.Tensor
    spare: tuple[torch.Tensor, ...]


class TileScratch:
    """Three rows of ``numel`` elements, or six shorter ones and the dither, over the same bytes of ``buffer``."""

    __slots__ = ("_large", "_small", "dither", "numel", "small_numel")

    def __init__(self, buffer: torch.Tensor, numel: int) -> None:
        self.numel = numel
        self.small_numel = min(numel, _SMALL_NUMEL)
        words = buffer[: self.nbytes(numel)].view(torch.float32)
        self._large = _rows_of(words[: 3 * numel].view(3, numel))
        self._small = _rows_of(words[: 6 * self.small_numel].view(6, self.small_numel))
        self.dither = Dither(words[6 * self.small_numel :][: Dither.num_words(self.small_numel)])

    def release(self) -> None:
        """Let go of the buffer; the scratch is of no use any more."""
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        self._large = self._small = TileRows(nothing, nothing, nothing, ())
        self.dither = Dither(nothing)

    def rows(self, *, small: bool) -> TileRows:
        """Return the rows of a small tile (``small_numel`` elements) or of a large one (``numel``)."""
        return self._small if small else self._large

    @staticmethod
    def nbytes(numel: int) -> int:
        """Return the bytes that scratch for tiles of ``numel`` elements (a multiple of 1,024) takes."""
        small = min(numel, _SMALL_NUMEL)
        return max(12 * numel, 24 * small + 4 * Dither.num_words(small))


def _rows_of(rows: torch.Tensor) -> TileRows:
    return TileRows(rows[0], rows[1], rows[2], tuple(rows[3:]))


class Dither:
    """Random numbers for the elements of a tile, made on demand; over ``words``, fp32 memory that it owns.

    ``aim`` names the parameter and its step; ``aim_at_nearest`` makes every number one half, which is rounding to
    nearest. Not thread-safe.
    """

    __slots__ = ("_aim", "_hash", "_is_hashed", "_kinds", "_position", "_rows", "_scratch", "numel")

    def __init__(self, words: torch.Tensor) -> None:
        self.numel = words.numel() // 9
        self._rows = words[: 3 * self.numel].view(3, self.numel).view(torch.int32)
        longs = words[3 * self.numel : 9 * self.numel].view(torch.int64).view(3, self.numel)
        self._position, self._hash, self._scratch = longs[0], longs[1], longs[2]
        self._aim: tuple[int, int] | None = None  # (seed, first position); None: every number is one half
        self._is_hashed = False
        self._kinds: list[tuple[int, int] | None] = [None, None, None]
        if self.numel:
            torch.arange(self.numel, dtype=torch.int64, device=words.device, out=self._position)

    @staticmethod
    def num_words(numel: int) -> int:
        """Return the fp32 words that dither for tiles of ``numel`` elements takes."""
        return 9 * min(numel, _PERIOD)

    def aim(self, name: str, step: int, start: int) -> None:
        """Make the numbers those of parameter ``name`` in ``step`` for the tile that begins at element ``start``."""
        seed = (zlib.crc32(name.encode()) * 0x9E3779B1 + step * 0x85EBCA77) & _MASK
        if self._aim == (seed, start % _PERIOD):
            return
        self._aim = (seed, start % _PERIOD)
        self._is_hashed = False
        self._kinds = [None, None, None]

    def _make_hash(self, seed: int, start: int) -> None:
        value, scratch = self._hash, self._scratch
        torch.add(self._position, start, out=value)
        value.bitwise_and_(_PERIOD - 1).mul_(0x9E3779B1).add_(seed).bitwise_and_(_MASK)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # avalanche: each bit depends on all
            torch.bitwise_right_shift(value, shift, out=scratch)
            value.bitwise_xor_(scratch).mul_(factor).bitwise_and_(_MASK)

    def aim_at_nearest(self) -> None:
        """Make every number one half."""
        if self._aim is not None:
            self._kinds = [None, None, None]
        self._aim = None

    def add(self, tile: torch.Tensor, stream: int, *, bits: int, offset: int) -> None:
        """Add to ``tile`` (int32) a number in [0, 2**bits) per element, and ``offset``.

        ``stream`` (0, 1 or 2): numbers of different streams have little to do with each other.
        """
        if self._kinds[stream] != (bits, offset):
            self._kinds[stream] = (bits, offset)
            self._fill(stream, bits, offset)
        row = self._rows[stream]
        whole = tile.numel() // self.numel * self.numel
        if whole:
            tile[:whole].view(-1, self.numel).add_(row)
        if whole < tile.numel():
            tile[whole:].add_(row[: tile.numel() - whole])

    def numbers(self, stream: int, fill: Callable[[int, int, int, int, int], None]) -> tuple[int, int, int, bool]:
        """Return the place of the numbers of the tile's elements, for a kernel that adds them itself as ``add`` does.

        The tuple has the address of ``period`` hashes (uint32), ``period``, the bits by which ``stream`` has them
        shifted, and whether they count; where not, every number is one half. The lowest bits are the number. Valid
        until the next call of any other method. ``fill(address, numel, seed, start, mask)`` makes the hashes.
        """
        assert self.numel, "this dither was made for what rounds nothing"
        row = self._rows[0]
        if self._aim is not None and self._kinds[0] != _ALL:
            self._kinds[0] = _ALL
            fill(row.data_ptr(), self.numel, *self._aim, _PERIOD - 1)
        return row.data_ptr(), self.numel, _SHIFTS[stream], self._aim is not None

    def _fill(self, stream: int, bits: int, offset: int) -> None:
        row = self._rows[stream]
        if self._aim is None:
            row.fill_((1 << bits >> 1) + offset)
            return
        if not self._is_hashed:  # late: most tiles of exact state never ask
            self._is_hashed = True
            self._make_hash(*self._aim)
        torch.bitwise_right_shift(self._hash, _SHIFTS[stream], out=self._scratch)
        row.copy_(self._scratch.bitwise_and_((1 << bits) - 1).add_(offset))
