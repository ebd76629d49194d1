"""Extents: where on the devices the bytes of a record lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["Extent", "pieces"]


class Extent(NamedTuple):
    """A contiguous range of one file: the device's index, the file's number, offset and length in bytes."""

    device: int
    file: int
    offset: int
    nbytes: int


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
