"""The layouts of a model's units, as a commit describes them: without the model, from bytes that may be anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tiered.zero.layout import SegmentSpec, UnitLayout, lay_out

__all__ = ["committed_layouts", "count_in", "text_in"]

_LARGEST = 1 << 53  # of a number in a description


def committed_layouts(state: Mapping[str, Any]) -> Iterator[tuple[str, UnitLayout]]:
    """Yield the name and the layout of each unit in ``state``, what ``ModelState.state_dict`` returned.

    Raises LookupError, TypeError, ValueError, AttributeError for a description that no version writes.
    """
    for unit, described in state["units"].items():
        trained = set(map(text_in, state["trained"][unit]))
        yield text_in(unit), lay_out(unit, [_spec(each, trained) for each in described])


def _spec(described: Mapping[str, Any], trained: set[str]) -> SegmentSpec:
    name, dtype = text_in(described["name"]), getattr(torch, text_in(described["dtype"]).removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a parameter of dtype {dtype}")
    shape, strides = (tuple(map(count_in, described[word])) for word in ("shape", "strides"))
    return SegmentSpec(name, shape, strides, dtype, name in trained)


def text_in(value: object) -> str:
    """Return ``value`` of a description if it is a text. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value


def count_in(value: object) -> int:
    """Return ``value`` of a description if it is a whole number from 0 on. Raises ValueError."""
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError("a number out of range")
    return value
