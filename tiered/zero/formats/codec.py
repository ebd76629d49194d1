"""Buckets and pieces: the stretches of parameters that move together as one key, and the update of pieces.

A bucket is a slice of a unit's state; it consists of pieces, each a stretch of one parameter. state_layout.py lays
the bytes of a piece out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from tiered.units import round_up
from tiered.zero.formats.rules import Hyperparameters
from tiered.zero.formats.state_layout import Layout, Layouts
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import CUT_NUMEL, cut

__all__ = ["Bucket", "Piece", "Source", "StatefulSegment", "divide", "update_pieces"]

_SMALLEST_BUCKET_NBYTES = 64  # where a rule remembers nothing, as SGD without momentum: a key still has bytes


class StatefulSegment(Protocol):
    """A parameter as its state knows it; the dither depends on the name."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def stretch(self) -> range: ...  # its elements, in memory order, whose state lies here: in one rank's shard


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

    __slots__ = ("key", "nbytes", "pieces", "segments")

    def __init__(self, key: str) -> None:
        self.key = key
        self.pieces: list[Piece[S]] = []
        self.segments: set[S] = set()  # of the pieces
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"Bucket({self.key!r}, {len(self.pieces)} pieces, {self.nbytes} B)"


def divide(key: str, segments: Sequence[S], bucket_numel: int, layouts: Layouts, *, first: int = 0) -> list[Bucket[S]]:
    """Divide ``segments`` into buckets of at most ``bucket_numel`` elements, in their order (see ``cut``).

    The bucket keys are ``key/<first>``, ``key/<first + 1>``, ... A piece never crosses a parameter.
    """
    buckets: list[Bucket[S]] = []
    for cuts in cut([segment.stretch for segment in segments], bucket_numel):
        bucket: Bucket[S] = Bucket(f"{key}/{first + len(buckets)}")
        for index, start, stop in cuts:
            segment = segments[index]
            piece = Piece(segment, layouts.of(segment.dtype), start, stop, offset=bucket.nbytes)
            bucket.pieces.append(piece)
            bucket.segments.add(segment)
            bucket.nbytes += piece.nbytes
        bucket.nbytes = max(bucket.nbytes, _SMALLEST_BUCKET_NBYTES)
        buckets.append(bucket)
    return buckets


class Source(NamedTuple):
    """The contribution of one parameter to an update: (numel,) each, in memory order, from element ``first`` on."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    factor: torch.Tensor | None  # () clip factor, multiplied to the gradient in fp32
    hyper: Hyperparameters
    first: int = 0


class _Alike:
    """Pieces that are updated with the same hyperparameters and factor, all at one time."""

    def __init__(self, layout: Layout, factor: torch.Tensor | None, hyper: Hyperparameters) -> None:
        self.layout, self.factor, self.hyper = layout, factor, hyper
        self.numel = 0
        self.parameters: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.views: list[Sequence[torch.Tensor]] = []

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Add a piece: (numel,) each, and the fields of its state."""
        self.numel += round_up(parameter.numel(), CUT_NUMEL)
        self.parameters.append(parameter)
        self.gradients.append(gradient)
        self.views.append(views)

    def update(self, scratch: TileScratch) -> None:
        """Do one update of each piece in place."""
        self.layout.update_all(self.parameters, self.gradients, self.views, self.factor, self.hyper, scratch)


def update_pieces(parts: Iterable[tuple[Piece[S], torch.Tensor, Source]], scratch: TileScratch) -> None:
    """Do one update of each piece in place: those together that need no scratch or little of it, others by tiles.

    ``parts``: each piece with the uint8 bytes of its bucket, and the source of its parameter.
    """
    together: dict[Hashable, _Alike] = {}
    for piece, bucket, (parameter, gradient, factor, hyper, first) in parts:
        layout, views = piece.layout, piece.views(bucket)
        start, stop = piece.start - first, piece.stop - first
        parameter, gradient = parameter[start:stop], gradient[start:stop]
        most = layout.most_together(gradient, factor, scratch)
        if piece.numel <= most:
            kind = layout.dtype, id(factor), id(hyper.values), hyper.step, hyper.begins
            alike = together.get(kind)
            if alike is not None and alike.numel + piece.numel > most:
                together.pop(kind).update(scratch)
                alike = None
            if alike is None:
                alike = together[kind] = _Alike(layout, factor, hyper)
            alike.add(parameter, gradient, views)
            continue
        numel = layout.tile_numel(scratch)
        for start in range(0, piece.numel, numel):
            stop = min(start + numel, piece.numel)
            scratch.dither.aim(piece.segment.name, hyper.step, piece.start + start)
            layout.tile(views, start, stop).update(parameter[start:stop], gradient[start:stop], factor, hyper, scratch)
    for alike in together.values():
        alike.update(scratch)
