"""Extents: where on the devices the bytes of a record lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Extent", "cut", "join", "pieces"]


class Extent(NamedTuple):
    """A contiguous range of one file: the device's index, the file's number, offset and length in bytes."""

    device: int
    file: int
    offset: int
    nbytes: int


def join(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return ``extents`` with those that go on where the one before ends made one."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is not None and last[:2] == extent[:2] and last.offset + last.nbytes == extent.offset:
            joined[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            joined.append(extent)
    return tuple(joined)


def cut(extents: Iterable[Extent], sizes: Iterable[int]) -> Iterator[tuple[Extent, ...]]:
    """Yield, for each of ``sizes``, the parts of ``extents`` that hold the next so many bytes of their record."""
    rest = iter(extents)
    extent = Extent(0, 0, 0, 0)
    for size in sizes:
        found: list[Extent] = []
        wanted = size
        while wanted:
            if not extent.nbytes:
                extent = next(rest)
            length = min(extent.nbytes, wanted)
            found.append(extent._replace(nbytes=length))
            extent = extent._replace(offset=extent.offset + length, nbytes=extent.nbytes - length)
            wanted -= length
        yield tuple(found)


def pieces(extents: Iterable[Extent], start: int, nbytes: int) -> Iterator[Extent]:
    """Yield, in order, the parts of ``extents`` that hold the logical bytes [start, start + nbytes) of their record.

    Raises ValueError when the extents end before that.
    """
    skip, wanted = start, nbytes
    for extent in extents:
        if wanted == 0:
            return
        if skip >= extent.nbytes:
            skip -= extent.nbytes
            continue
        length = min(extent.nbytes - skip, wanted)
        yield extent._replace(offset=extent.offset + skip, nbytes=length)
        skip, wanted = 0, wanted - length
    if wanted:
        raise ValueError(f"bytes [{start}, {start + nbytes}) end {wanted} bytes beyond their extents")
