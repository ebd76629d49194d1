"""In place: frozen spans that stay in the safetensors files that a model is loaded from."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tiered.errors import UsageError
from tiered.store.format.row import ExternalRange, Spec
from tiered.store.store import Store
from tiered.units import format_bytes
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.weights import Weights

__all__ = ["find_in_place"]

_log = logging.getLogger("tiered")


def find_in_place(store: Store, units: Sequence[Unit], source: Weights) -> dict[str, tuple[Spec, list[ExternalRange]]]:
    """Return the keys of frozen spans whose bytes lie in the files of ``source``, and where; for ``adopt``.

    A span stays there where the store has its files open, in its ``external``, and they have all of its values with
    the same dtype and in the same order. One line of the log says how much is to be copied although its file is open.
    """
    found: dict[str, tuple[Spec, list[ExternalRange]]] = {}
    left: list[str] = []
    copied = 0
    for unit in units if store.external.paths else ():
        for number, span in enumerate(unit.layout.spans):
            segments = [segment for segment in unit.segments if segment.span == number]
            if span.trainable or not segments:
                continue
            ranges = _ranges(store, segments, source)
            if isinstance(ranges, str):
                left.append(ranges)
                copied += span.nbytes
            else:
                found[span.key] = (Spec(torch.uint8, (span.nbytes,)), ranges)
    if found or left:
        others = f"; {format_bytes(copied)} are copied, such as those with {left[0]}" if left else ""
        nbytes = sum(spec.nbytes for spec, _ in found.values())
        _log.info("%s of frozen parameters are read in place%s", format_bytes(nbytes), others)
    return found


def _ranges(store: Store, segments: Sequence[Segment], source: Weights) -> list[ExternalRange] | str:
    """Return where in the store's external files the bytes of ``segments`` lie, or why they do not lie there."""
    ranges: list[ExternalRange] = []
    for segment in segments:
        place = source.place(segment)
        if place is None:
            return f"{segment.name}, which no file has in this order"
        try:
            entry = store.external.find(*place)
            with store.working_set.condition:
                file = store.external.number(place[0])
        except UsageError:
            return f"{segment.name}, whose file is not among the external ones"
        if getattr(torch, entry.dtype, None) != segment.dtype or entry.nbytes != segment.nbytes:
            return f"{segment.name}, which is {entry.dtype} there and {segment.dtype} here"
        if segment.nbytes:
            ranges.append(ExternalRange(segment.offset, file, entry.offset, entry.nbytes))
    return sorted(ranges) or "parameters without elements"
