"""The parameters of a committed model, by the description that rides along with the commit; no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.store.format.root import Root
from tiered.store.format.row import Row
from tiered.units import divide_up
from tiered.zero.committed_layout import committed_layouts, count_in, text_in
from tiered.zero.formats.codec import divide
from tiered.zero.formats.layout import FORMATS, Layouts
from tiered.zero.formats.rules import AdamWRule, LionRule, Rule, SGDRule
from tiered.zero.layout import CUT_NUMEL, SegmentSpec

__all__ = ["CommittedParameter", "committed_parameters", "describes_parameters"]

_IN_THE_COMMIT = "in the commit itself"

_RULES: dict[str, Rule] = {
    "AdamW": AdamWRule(),
    "Lion": LionRule(),
    "SGD": SGDRule(with_momentum=True),
    "SGD without momentum": SGDRule(with_momentum=False),
}


@dataclass(frozen=True, slots=True)
class CommittedParameter:
    """One parameter of a committed model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_trained: bool
    steps: int | None  # of the optimizer; None: it has no state
    key: str  # of the store, or words where it lies in none
    offset: int  # bytes from the start of the key
    nbytes: int
    files: tuple[str, ...]  # the user's own that it is read from in place
    state_keys: tuple[str, ...]
    state_nbytes: int  # padding included


def describes_parameters(registered: Mapping[str, Any]) -> bool:
    """Return whether a commit, whose objects these are, describes parameters: of a model, or of an optimizer alone."""
    return "tiered.model" in registered or "tiered.optimizer" in registered


def committed_parameters(
    registered: Mapping[str, Any], rows: Mapping[str, Row], root: Root
) -> list[CommittedParameter]:
    """Return the parameters in the order of units and modules.

    Raises UsageError for a commit without a description, or with one that this version does not write.
    """
    if not describes_parameters(registered):
        raise UsageError("no model is committed there: expected a store that tiered.shard has moved a model into")
    try:
        return list(_parameters(registered, rows, root))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UsageError(
            "the description of the model in the commit is none that this version of tiered writes: open it with the"
            f" version that did ({_short(error)})"
        ) from error


def _short(error: Exception) -> str:
    text = repr(error)
    return text if len(text) <= 100 else f"{text[:80]} ... {text[-16:]}"


def _parameters(registered: Mapping[str, Any], rows: Mapping[str, Row], root: Root) -> Iterator[CommittedParameter]:
    model, optimizer = registered.get("tiered.model"), registered.get("tiered.optimizer", {})
    steps = {text_in(name): count_in(number) for name, number in optimizer.get("steps", {}).items()}
    if model is None:  # plain parameters: their bytes are the program's own
        for name, number in steps.items():
            yield CommittedParameter(name, (), "", True, number, "not in the store", 0, 0, (), (), 0)
        return
    for unit, layout in committed_layouts(model):
        state = _state(unit, layout.specs, optimizer)
        for spec, place in zip(layout.specs, layout.places, strict=True):
            key = layout.spans[place.span].key
            keys, nbytes = state.get(spec.name, ((), 0))
            files = _files(rows.get(key), root, place.offset, spec.nbytes)
            yield CommittedParameter(
                spec.name, spec.shape, _shown_dtype(spec.dtype), spec.trainable, steps.get(spec.name), key,
                place.offset, spec.nbytes, files, keys, nbytes,
            )  # fmt: skip
    for name, tensor in model.get("added", {}).items():
        yield CommittedParameter(
            text_in(name), tuple(tensor.shape), _shown_dtype(tensor.dtype), tensor.requires_grad, steps.get(name),
            _IN_THE_COMMIT, 0, tensor.nbytes, (), (), 0,
        )  # fmt: skip


def _state(
    unit: str, specs: Sequence[SegmentSpec], optimizer: Mapping[str, Any]
) -> dict[str, tuple[tuple[str, ...], int]]:
    """Return the keys and the bytes of the optimizer's state of each parameter of a unit, by name."""
    found: dict[str, tuple[tuple[str, ...], int]] = {}
    if not optimizer:
        return found
    if optimizer["state"] not in FORMATS:
        raise ValueError(f"state in a format {optimizer['state']!r}")
    layouts = Layouts(optimizer["state"], _RULES[optimizer["class"]], sizes_only=True)
    bucket_numel = count_in(optimizer["bucket_numel"])
    if not bucket_numel or bucket_numel % CUT_NUMEL:
        raise ValueError(f"buckets of {bucket_numel} elements")
    if sum(divide_up(spec.numel, bucket_numel) for spec in specs) > _MOST_PIECES:
        raise ValueError("more pieces of state than a store has")
    first = 0
    for managed in optimizer["managed"]:
        own = [spec for spec in specs if spec.name in set(managed)]
        buckets = divide(f"model/state/{unit}", own, bucket_numel, layouts, first=first)
        first += len(buckets)
        for bucket in buckets:
            for piece in bucket.pieces:
                keys, nbytes = found.get(piece.segment.name, ((), 0))
                found[piece.segment.name] = ((*keys, bucket.key), nbytes + piece.nbytes)
    return found


_MOST_PIECES = 1 << 20  # of a unit


def _files(row: Row | None, root: Root, offset: int, nbytes: int) -> tuple[str, ...]:
    """Return the names of the user's own files that these bytes of a record lie in."""
    ranges = [] if row is None else row.ranges
    here = [each for each in ranges if each.start < offset + nbytes and offset < each.start + each.nbytes]
    return tuple(dict.fromkeys(root.external[each.file].name for each in here))


def _shown_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
