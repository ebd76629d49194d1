"""Layout: the division of a model into units, and the arithmetic of their places: spans, segments, cuts, budget shares.

A unit is the modules that move together: one or more spans. A span is one key of the store and has one dtype and one
trainability. This file touches no bytes and knows no store: its readers are shard, the plan of a run and the
optimizer's buckets. A commit describes the layouts of a model's units: they are read back without the model, from bytes
that may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.units import MiB, round_up

__all__ = [
    "CUT_NUMEL",
    "LEAST_BUCKET_NUMEL",
    "PAGE_NBYTES",
    "TOGETHER_NUMEL",
    "Place",
    "SegmentSpec",
    "Shares",
    "Span",
    "Stretch",
    "UnitLayout",
    "UnitRule",
    "WorkSizes",
    "bucket_numel_for",
    "committed_layouts",
    "count_in",
    "cut",
    "divide_into_units",
    "lay_out",
    "share_out",
    "text_in",
    "tile_numel_for",
    "whole_pages",
]


CUT_NUMEL = 128
"""Elements: each segment starts at a multiple of it in its span, and a parameter is cut at multiples of it alone.

So the vectorised kernels meet the same lanes and tails as on the whole parameter (they differ below 8 elements), and
128 elements share one scale in the compact format.
"""

PAGE_NBYTES = 4096
"""Bytes that keys, shards and leases are padded to."""

TILE_NUMEL = 1 << 20
"""Elements that one call updates: enough that calls cost nothing; tiles that stay in the caches take no less time."""

LEAST_BUCKET_NUMEL = 1 << 14
"""Elements of buckets in models of tiny units, 160 KiB of exact state: smaller ones take as much CPU time."""

TOGETHER_NUMEL = 1 << 17
"""Elements of small parameters that are updated at one time, where calls of torch cost more than their arithmetic."""

_PART = 1024  # of a model's elements: so many are in a bucket, or updated together, at least
_BUCKET_NUMEL = 1 << 22  # elements; 40 MiB of exact state: ten blocks in flight
_BUCKETS_PER_UNIT = 8  # buckets shrink with the unit, so that small models run in small budgets
_STEP_NUMEL = 8 * CUT_NUMEL  # buckets and tiles are multiples of it


# -- units ---------------------------------------------------------------------------------------------------------

UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGE_NBYTES = 16 * MiB


def divide_into_units(model: nn.Module, rule: UnitRule) -> dict[str, nn.Module]:
    """Return the modules that are units, by name, in the order of ``model.named_modules()``; the rest is the root's.

    ``rule``: a module class or several, or a function ``(name, module) -> bool``. None: the elements of each
    ``ModuleList``, ``Sequential`` or ``ModuleDict`` of repeated blocks, and each remaining module whose own parameters
    take at least 16 MiB or an eighth of the model. Raises UsageError for a rule that finds nothing.
    """
    if rule is None:
        return _default_units(model)
    chosen: dict[str, nn.Module]
    if isinstance(rule, type | tuple):
        kinds: Any = rule
        chosen = {name: module for name, module in model.named_modules() if name and isinstance(module, kinds)}
    elif callable(rule):
        chosen = {name: module for name, module in model.named_modules() if name and rule(name, module)}
    else:
        raise TypeError(
            f"unit={rule!r}; expected a module class, a tuple of them, a function (name, module) -> bool, or None"
        )
    chosen = {name: module for name, module in chosen.items() if _nbytes_of(module)}
    if not chosen:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(f"unit={rule!r} matches no module with parameters; the model has {', '.join(present)}")
    return chosen


def _default_units(model: nn.Module) -> dict[str, nn.Module]:
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and not _inside(name, units) and _is_repeated(module):
            for child_name, child in module.named_children():
                if _nbytes_of(child):
                    units[f"{name}.{child_name}" if name else child_name] = child
    large = min(_LARGE_NBYTES, max(1, _nbytes_of(model) // 8))
    for name, module in model.named_modules():
        if name and not _inside(name, units) and _own_nbytes(module) >= large:
            units[name] = module
    order: dict[str, int] = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(units.items(), key=lambda item: order[item[0]]))


def _is_repeated(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if _nbytes_of(child)]
    return len(kinds) > len(set(kinds))


def _inside(name: str, units: dict[str, nn.Module]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _nbytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _own_nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))


# -- spans ---------------------------------------------------------------------------------------------------------


class SegmentSpec(NamedTuple):
    """One parameter as its unit is laid out for it. ``strides`` count elements and leave no gap and no overlap."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without padding."""
        return self.numel * self.dtype.itemsize


class Place(NamedTuple):
    """The place of one segment: its span, and bytes from the start of the span and of its unit's gradients."""

    span: int
    offset: int
    grad_offset: int  # -1 in a frozen span, which has no gradients


class Span(NamedTuple):
    """Segments of one dtype and one trainability: one flat buffer of ``nbytes``, padding included.

    ``key`` has one rank's shard of it, ``shard_nbytes``: all shards are equal, and follow each other in the order of
    the ranks. ``grad_offset``: the start of its gradients among those of the unit, in bytes; -1 for a frozen
    span.
    """

    key: str
    dtype: torch.dtype
    trainable: bool
    nbytes: int
    shard_nbytes: int
    grad_offset: int


class Stretch(NamedTuple):
    """Elements [start, stop) of segment ``number`` of its unit, in memory order, that lie in one rank's shard.

    ``offset`` counts bytes from the start of the shard of ``span``, ``grad_offset`` those of the unit's trainable
    shards, one after the other; -1 in a frozen span.
    """

    number: int
    start: int
    stop: int
    span: int
    offset: int
    grad_offset: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit: ``specs`` in the order of the modules, the ``place`` of each, and its spans, trainable ones first.

    Gradients have the layout of the trainable spans, one after the other, in the parameters' dtypes. ``world`` ranks
    have a shard each of every span; on one rank the shard is the span.
    """

    name: str
    specs: tuple[SegmentSpec, ...]
    places: tuple[Place, ...]
    spans: tuple[Span, ...]
    world: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.nbytes for span in self.spans)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the unit's gradients: those of the trainable spans."""
        return sum(span.nbytes for span in self.spans if span.trainable)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one rank's shards of all spans."""
        return self.nbytes // self.world

    @property
    def shard_gradient_nbytes(self) -> int:
        """Bytes of one rank's shards of the unit's gradients."""
        return self.gradient_nbytes // self.world

    @property
    def trainable_numel(self) -> int:
        """Elements of the trainable segments."""
        return sum(spec.numel for spec in self.specs if spec.trainable)

    def stretches(self, rank: int) -> list[Stretch]:
        """Return the stretch of each segment that lies in the shards of ``rank``, in the segments' order.

        A segment that lies in other shards alone has none. Stretches begin at multiples of CUT_NUMEL of their segments,
        and end at such or with them: a shard is whole pages, and 4,096 bytes are a multiple of CUT_NUMEL elements.
        """
        found: list[Stretch] = []
        for number, (spec, place) in enumerate(zip(self.specs, self.places, strict=True)):
            span = self.spans[place.span]
            begin = rank * span.shard_nbytes
            first = max(place.offset, begin)
            last = min(place.offset + spec.nbytes, begin + span.shard_nbytes)
            if first < last:
                size = spec.dtype.itemsize
                bounds = (first - place.offset) // size, (last - place.offset) // size
                offset = first - begin
                grad_offset = span.grad_offset // self.world + offset if span.trainable else -1
                found.append(Stretch(number, *bounds, place.span, offset, grad_offset))
        return found

    def with_trainable(self, names: Iterable[str]) -> UnitLayout:
        """Return the layout of the same segments in which those called ``names`` are the trainable ones."""
        trained = set(names)
        specs = [spec._replace(trainable=spec.name in trained) for spec in self.specs]
        return lay_out(self.name, specs, self.world)

    def moved(self, old: UnitLayout, span: int, offset: int) -> tuple[int, int]:
        """Return the new span and byte of the value that lay at byte ``offset`` of ``span`` in the layout ``old``."""
        number = max(
            (place.offset, spec.numel > 0, number)
            for number, (spec, place) in enumerate(zip(old.specs, old.places, strict=True))
            if place.span == span and place.offset <= offset
        )[2]
        place = self.places[number]
        return place.span, place.offset + offset - old.places[number].offset


def lay_out(name: str, specs: Sequence[SegmentSpec], world: int = 1) -> UnitLayout:
    """Return the layout of the unit ``name`` over ``world`` ranks: each span is padded to whole pages for each.

    The first span's key is ``model/parameters/<name>``. The key of another names its kind before the unit,
    ``model/parameters/.frozen/<name>``: no unit's name begins with a dot, so no two units share a key.
    """
    kinds = list(dict.fromkeys((spec.dtype, spec.trainable) for spec in specs)) or [(torch.uint8, False)]
    kinds.sort(key=lambda kind: not kind[1])  # a stable sort: the first of each kind decides
    offsets = [0] * len(kinds)
    starts = []
    for spec in specs:
        index = kinds.index((spec.dtype, spec.trainable))
        starts.append((index, offsets[index]))
        offsets[index] += round_up(spec.numel, CUT_NUMEL) * spec.dtype.itemsize
    spans, grad_offset = [], 0
    for index, (dtype, trainable) in enumerate(kinds):
        nbytes = max(round_up(offsets[index], PAGE_NBYTES * world), PAGE_NBYTES * world)
        key = _key(name, dtype, trainable, kinds[0]) if index else f"model/parameters/{name}"
        spans.append(Span(key, dtype, trainable, nbytes, nbytes // world, grad_offset if trainable else -1))
        grad_offset += nbytes if trainable else 0
    places = [
        Place(index, offset, spans[index].grad_offset + offset if spans[index].trainable else -1)
        for index, offset in starts
    ]
    return UnitLayout(name, tuple(specs), tuple(places), tuple(spans), world)


def _key(name: str, dtype: torch.dtype, trainable: bool, first: tuple[torch.dtype, bool]) -> str:
    words = [] if dtype == first[0] else [str(dtype).removeprefix("torch.")]
    words += [] if trainable else ["frozen"]
    return f"model/parameters/.{'.'.join(words)}/{name}"


# -- cut points: buckets and tiles ---------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Elements [start, stop) of segment number ``number``, in memory order."""

    number: int
    start: int
    stop: int


def cut(stretches: Sequence[range], bucket_numel: int) -> list[list[Cut]]:
    """Divide the ``stretches`` of segments, in their order, into buckets of at most ``bucket_numel`` elements.

    A stretch is the elements of a segment that lie in one rank's shard. A cut never crosses a segment, and one in the
    middle of a segment is at a multiple of CUT_NUMEL.
    """
    assert bucket_numel % CUT_NUMEL == 0
    buckets: list[list[Cut]] = []
    left = 0
    for index, stretch in enumerate(stretches):
        start, last = stretch.start, stretch.stop
        while start < last:
            if left < min(CUT_NUMEL, last - start):
                buckets.append([])
                left = bucket_numel
            stop = last if last - start <= left else start + left // CUT_NUMEL * CUT_NUMEL
            buckets[-1].append(Cut(index, start, stop))
            left -= stop - start
            start = stop
    return buckets


def bucket_numel_for(num_trainable: Iterable[int]) -> int:
    """Return the elements per bucket for units with these numbers of trainable elements; a multiple of 1,024.

    An eighth of the largest unit, and of many small units a 1,024th of the model, up to TOGETHER_NUMEL.
    Depends on the model alone, so that a store can be resumed under another budget.
    """
    numels = [*num_trainable, 1]
    share = round_up(-(-max(numels) // _BUCKETS_PER_UNIT), _STEP_NUMEL)
    return min(_BUCKET_NUMEL, max(LEAST_BUCKET_NUMEL, share, _part_of(numels)))


def tile_numel_for(bucket_numel: int, numels: Sequence[int]) -> int:
    """Return the elements per tile: no more than a bucket or the largest parameter needs; a multiple of 1,024.

    Of many small parameters a tile takes as many as ``bucket_numel_for`` says.
    """
    return min(TILE_NUMEL, bucket_numel, max(round_up(max([*numels, 1]), _STEP_NUMEL), _part_of(numels)))


def _part_of(numels: Iterable[int]) -> int:
    return min(TOGETHER_NUMEL, round_up(sum(numels) // _PART, _STEP_NUMEL))


# -- shares of a budget --------------------------------------------------------------------------------------------


def whole_pages(nbytes: int) -> int:
    """Return the bytes of DRAM that a key of ``nbytes`` takes."""
    return round_up(nbytes, PAGE_NBYTES)


class WorkSizes(NamedTuple):
    """Bytes that work on one unit takes beside its parameters and gradients: one bucket, and the tile scratch."""

    bucket: int
    scratch: int


@dataclass(frozen=True, slots=True)
class Shares:
    """The division of a DRAM budget, in bytes; the sum is the budget.

    ``held``: kept for good. ``window``: read ahead of need, beside the unused bytes of other shares. ``gathered``: the
    root and the unit that computes, or all. ``gradients``: theirs. ``update``: one unit more, its gradient, 3 buckets
    and the tile scratch. ``exchange``: over ranks, the shards that are gathered, and one whole gradient that is
    received. ``behind``: over ranks, one whole gradient more, which is exchanged while the next unit computes; 0 where
    the budget has no room for it, and the backward waits. ``activations``: saved by autograd, and the rest.

    ``read_ahead`` is no share: the schedule may read so many bytes ahead of need, the window and the idle part of the
    update's share. ``stage``: see ``share_out``.
    """

    held: int
    window: int
    gathered: int
    gradients: int
    update: int
    exchange: int
    behind: int
    activations: int
    read_ahead: int
    stage: int

    @property
    def smallest(self) -> int:
        """The smallest budget: the sum where nothing is held, read ahead, or the caller's."""
        return self.gathered + self.gradients + self.update + self.exchange

    @property
    def spare(self) -> int:
        """The bytes that are neither held nor part of the smallest budget."""
        return self.window + self.activations


def share_out(
    units: Sequence[UnitLayout], sizes: WorkSizes, budget_bytes: int, *, held: int | None = None, stage: int = 3
) -> Shares:
    """Divide ``budget_bytes`` for ``units``, the root unit first; ``held`` overrides how much is held for good.

    Reading ahead wants the next unit's parameters and 3 buckets. Writes in flight must find room beside them, or bytes
    that were read ahead are evicted before their use and read twice. All else is held. Below the smallest budget the
    held and read-ahead shares are negative or 0: the caller compares ``smallest``. Over ranks whole units are gathered
    and have whole gradients; what is held, read ahead and updated are one rank's shards.
    """
    root, *others = units
    both = sorted(others, key=lambda unit: unit.nbytes + unit.gradient_nbytes, reverse=True)
    is_over_ranks = root.world > 1
    gathered = root.nbytes + sum(unit.nbytes for unit in (both if is_over_ranks and stage < 3 else both[:1]))
    with_gradients = both if is_over_ranks and stage < 2 else both[:1]
    gradients = root.gradient_nbytes + sum(unit.gradient_nbytes for unit in with_gradients)
    buckets = 3 * sizes.bucket
    update = sum(unit.shard_nbytes + unit.shard_gradient_nbytes for unit in both[1:2]) + buckets + sizes.scratch
    exchange = behind = 0
    spare = budget_bytes - gathered - gradients - update
    if is_over_ranks:
        received = max(unit.gradient_nbytes for unit in units)
        exchange = received + root.shard_nbytes + sum(unit.shard_nbytes for unit in both[:1])
        spare -= exchange
        behind = received if spare >= received + buckets + (held or 0) else 0
        spare -= behind
    parameters = max(unit.shard_nbytes for unit in units)
    largest_gradients = max(unit.shard_gradient_nbytes for unit in units)
    if held is None:
        held = max(0, spare - buckets)
    read_ahead = min(parameters + buckets, spare - held + max(largest_gradients, parameters))
    window = min(read_ahead, spare - held)
    return Shares(held, window, gathered, gradients, update, exchange, behind, spare - held - window, read_ahead, stage)


# -- committed layout --------------------------------------------------------------------------------------------------


_LARGEST = 1 << 53  # of a number in a description


def committed_layouts(state: Mapping[str, Any]) -> Iterator[tuple[str, UnitLayout]]:
    """Yield the name and the layout of each unit in ``state``, what ``ModelState.state_dict`` returned.

    Raises LookupError, TypeError, ValueError, AttributeError for a description that no version writes.
    """
    world = count_in(state.get("world", 1))  # an earlier release knew one rank alone
    if not world:
        raise ValueError("a model over no ranks")
    for unit, described in state["units"].items():
        trained = set(map(text_in, state["trained"][unit]))
        yield text_in(unit), lay_out(unit, [_spec(each, trained) for each in described], world)


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
