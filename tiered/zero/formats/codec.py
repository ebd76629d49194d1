"""Buckets and pieces: the stretches of parameters that move together as one key, and the update of one piece.

A bucket is a slice of a unit's state; it consists of pieces, each a stretch of one parameter. layout.py lays the bytes
of a piece out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from tiered.zero.formats.layout import Layout, Layouts
from tiered.zero.formats.rules import Hyperparameters
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import cut

__all__ = ["Bucket", "Piece", "StatefulSegment", "divide", "update_piece"]

_SMALLEST_BUCKET_NBYTES = 64  # where a rule remembers nothing, as SGD without momentum: a key still has bytes


class StatefulSegment(Protocol):
    """A parameter as its state knows it."""

    @property
    def name(self) -> str:
        """The parameter's name; the dither depends on it."""

    @property
    def dtype(self) -> torch.dtype:
        """The parameter's dtype."""

    @property
    def numel(self) -> int:
        """The parameter's elements."""


S = TypeVar("S", bound=StatefulSegment)


class Piece(Generic[S]):
    """Elements [start, stop) of one parameter, in memory order, and the place of their state in the bucket."""

    __slots__ = ("_places", "layout", "numel", "offset", "segment", "start", "stop")

    def __init__(self, segment: S, layout: Layout, start: int, stop: int, *, offset: int) -> None:
        self.segment = segment
        self.layout = layout
        self.start = start
        self.stop = stop
        self.numel = stop - start  # elements of the parameter
        self.offset = offset  # bytes
        self._places = layout.places(offset, self.numel)

    def __repr__(self) -> str:
        return f"Piece({self.segment.name!r}[{self.start}:{self.stop}] at {self.offset})"

    @property
    def nbytes(self) -> int:
        """Bytes of state, padding included."""
        return self.layout.nbytes(self.numel)

    def views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Return the fields as views of ``bucket``, the (nbytes,) uint8 of the whole bucket."""
        return [bucket[start:stop].view(dtype) for start, stop, dtype in self._places]


class Bucket(Generic[S]):
    """Pieces that move together under one key."""

    __slots__ = ("key", "nbytes", "pieces")

    def __init__(self, key: str) -> None:
        self.key = key
        self.pieces: list[Piece[S]] = []
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"Bucket({self.key!r}, {len(self.pieces)} pieces, {self.nbytes} B)"


def divide(key: str, segments: Sequence[S], bucket_numel: int, layouts: Layouts, *, first: int = 0) -> list[Bucket[S]]:
    """Divide ``segments`` into buckets of at most ``bucket_numel`` elements, in their order (see ``cut``).

    The bucket keys are ``key/<first>``, ``key/<first + 1>``, ... A piece never crosses a parameter.
    """
    buckets: list[Bucket[S]] = []
    for cuts in cut([segment.numel for segment in segments], bucket_numel):
        bucket: Bucket[S] = Bucket(f"{key}/{first + len(buckets)}")
        for index, start, stop in cuts:
            segment = segments[index]
            piece = Piece(segment, layouts.of(segment.dtype), start, stop, offset=bucket.nbytes)
            bucket.pieces.append(piece)
            bucket.nbytes += piece.nbytes
        bucket.nbytes = max(bucket.nbytes, _SMALLEST_BUCKET_NBYTES)
        buckets.append(bucket)
    return buckets


def update_piece(
    piece: Piece[S],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    bucket: torch.Tensor,
    hyper: Hyperparameters,
    factor: torch.Tensor | None,
    scratch: TileScratch,
) -> None:
    """Do one update of ``piece`` in place, tile by tile.

    ``parameter``, ``gradient``: (numel of the whole parameter,) in memory order, in the parameter's dtype; ``bucket``:
    the bucket's uint8 bytes; ``factor``: () clip factor multiplied to the gradient in fp32, or None.
    """
    layout, views, numel = piece.layout, piece.views(bucket), piece.layout.tile_numel(scratch)
    parameter, gradient = parameter[piece.start : piece.stop], gradient[piece.start : piece.stop]
    if layout.is_raw and (piece.numel <= numel or layout.needs_no_scratch(gradient, factor)):
        layout.update_raw(parameter, gradient, views, factor, hyper, scratch)
        return
    for start in range(0, piece.numel, numel):
        stop = min(start + numel, piece.numel)
        scratch.dither.aim(piece.segment.name, hyper.step, piece.start + start)
        layout.tile(views, start, stop).update(parameter[start:stop], gradient[start:stop], factor, hyper, scratch)
