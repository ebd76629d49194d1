"""The optimizer's state as it lies in the store: buckets per unit, created, read out and replaced.

This file knows the place of each element. The optimizer knows when to update it, state_layout.py how its bytes
are made.
Plain parameters, never sharded, look like units here: their state lies in a store, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiered.bytes.file_stream import FileMemory
from tiered.errors import UsageError
from tiered.store.residency.lease_view import Mode
from tiered.store.store import Store
from tiered.zero.formats.codec import Bucket, Piece, divide
from tiered.zero.formats.rules import Hyperparameters
from tiered.zero.formats.state_layout import Layouts, Tile
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.gradients.exchange import PlainGradients
from tiered.zero.layout import Place, UnitLayout
from tiered.zero.model_state import refuse_missing
from tiered.zero.optimizer.fp32_masters import Masters, leased, master_key, masters_nbytes, offsets_of
from tiered.zero.parameters.unit import Segment, Unit, digest
from tiered.zero.state_dict_copies import memory_for_copies
from tiered.zero.step import ONLY_ADDED

__all__ = ["OptimizerState", "PlainSegment", "PlainUnit", "StateUnit", "rounds_to"]


class PlainSegment(Segment):
    """A parameter in ordinary memory; its bytes are the caller's."""

    __slots__ = ()

    def memory(self) -> torch.Tensor:
        """Return the parameter's values: (numel,) in memory order, writable. Raises UsageError for a changed layout."""
        if self.parameter.stride() != self.strides:
            raise UsageError(
                f"parameter {self.name} has strides {self.parameter.stride()}, and had {self.strides} when the"
                " optimizer was made; expected the memory format to stay: change it before"
            )
        return self.parameter.detach().as_strided((self.numel,), (1,))

    def gradient(self) -> torch.Tensor:
        """Return the parameter's gradient: (numel,) in the same order; a copy where its strides differ."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(f"parameter {self.name}: a {gradient.layout} gradient; expected a dense one")
        if gradient.stride() != self.strides:
            ordered = torch.empty_strided(self.shape, self.strides, dtype=gradient.dtype, device="cpu")
            gradient = ordered.copy_(gradient)
        return gradient.detach().as_strided((self.numel,), (1,))

    def describe(self) -> str:
        """Return what an update will find, by digests; over ranks all have the same."""
        return f"a gradient of {self.name}, {digest(self.gradient()):016x}, and its values {digest(self.memory()):016x}"


class PlainUnit:
    """Plain parameters as one unit of optimizer state."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.name, self.world = "plain", 1
        self.segments: list[PlainSegment] = []
        self._exchanged: PlainGradients | None = None  # over ranks
        for name, parameter in parameters:
            if parameter.device.type != "cpu":
                raise UsageError(
                    f"parameter {name}, {tuple(parameter.shape)}, is in ordinary memory of {parameter.device}; expected"
                    " the CPU, a layer or an adapter that is added before tiered.shard(...), or an optimizer of torch's"
                    " own for it"
                )
            segment = PlainSegment(name, parameter, parameter.dtype)  # type: ignore[arg-type]
            if segment.strides != parameter.stride():
                raise UsageError(
                    f"parameter {name} does not fill its memory densely; expected p.data = p.data.contiguous()"
                )
            segment.unit = self  # type: ignore[assignment]
            self.segments.append(segment)

    def trained(self) -> list[PlainSegment]:
        """Return the segments whose parameters have a gradient now."""
        return [segment for segment in self.segments if segment.parameter.grad is not None]

    def share(self, store: Store, what: str) -> None:
        """Over ranks: take rank 0's values, and have the backwards of the model in ``store`` exchange gradients.

        Blocks for all ranks. Raises UsageError.
        """
        if store.ranks is None:
            return
        self._exchanged = PlainGradients.of(store)
        if self._exchanged is None:
            raise UsageError(
                f"{what} over ranks on plain parameters alone, such as {self.segments[0].name}: only the backwards of a"
                " sharded model exchange gradients; expected parameters that are used with one in the same store"
            )
        self._exchanged.look({segment.name: segment.parameter for segment in self.segments})

    def describe(self) -> list[str]:
        """Return what an update will find, over ranks. Raises UsageError for gradients of this rank alone."""
        if self._exchanged is not None and self._exchanged.are_added():
            raise UsageError(ONLY_ADDED)
        return [segment.describe() for segment in self.trained()]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop all gradients, or zero them."""
        if self._exchanged is not None:
            self._exchanged.forget([segment.parameter for segment in self.segments])
        for segment in self.segments:
            gradient = segment.parameter.grad
            if set_to_none or gradient is None:
                segment.parameter.grad = None
            else:
                gradient.detach_().zero_()

    def __repr__(self) -> str:
        return f"PlainUnit({len(self.segments)} parameters)"


# -- optimizer state ---------------------------------------------------------------------------------------------------


StateUnit = Unit | PlainUnit

_CHECKED_NUMEL = 1 << 18
"""Elements that are looked at together before they are loaded: 3 MiB of temporaries."""


class OptimizerState:
    """The buckets of every unit. ``steps`` counts the updates of each segment that has state.

    ``begun`` has the segments with moments that an update has made; moments of others are zero, and torch has none.
    ``scratch`` is lent by the update pipeline, which runs at other times. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[StateUnit],
        managed: Sequence[Collection[Segment]],
        layouts: Layouts,
        *,
        bucket_numel: int,
        scratch: TileScratch,
    ) -> None:
        self.bucket_numel = bucket_numel
        self.buckets: dict[StateUnit, list[Bucket[Segment]]] = {}
        self.steps: dict[Segment, int] = {}
        self.begun: set[Segment] = set()
        self._managed: list[list[Segment]] = []
        self._store = store
        self._layouts = layouts
        self._names = [moment.name for moment in layouts.rule.moments]
        self._parameter_nbytes = sum(unit.layout.shard_gradient_nbytes for unit in units if isinstance(unit, Unit))
        self._scratch = scratch
        self._units = units
        self.lay_out(managed)

    def __repr__(self) -> str:
        return f"OptimizerState({len(self.steps)} parameters, {self.nbytes} B)"

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for buckets in self.buckets.values() for bucket in buckets)

    @property
    def managed(self) -> list[list[str]]:
        """The names of the parameters with state: those of the start, then each group that got state together later."""
        return [[segment.name for segment in segments] for segments in self._managed]

    def lay_out(self, managed: Sequence[Collection[Segment]]) -> None:
        """Lay buckets out for the ``managed`` segments: first those of the start, then each collection of an ``add``.

        Moves no bytes; step counts are 0.
        """
        self._managed = [[s for unit in self._units for s in unit.segments if s in each] for each in managed]
        self.steps = {segment: 0 for segments in self._managed for segment in segments}
        self.begun = set()
        for unit in self._units:
            buckets = self.buckets.setdefault(unit, [])  # order: readers that know the list see the change
            buckets.clear()
            for segments in self._managed:
                buckets += self._divide(unit, segments)

    def _divide(self, unit: StateUnit, segments: Iterable[Segment]) -> list[Bucket[Segment]]:
        its = [segment for segment in segments if segment.unit is unit]
        first = len(self.buckets[unit])
        return divide(f"model/state/{unit.name}", its, self.bucket_numel, self._layouts, first=first)

    def add(self, unit: StateUnit, segments: Sequence[Segment]) -> None:
        """Give ``segments`` of ``unit``, frozen so far, fresh state in buckets of their own; blocks.

        Raises CapacityError where there is no space for them, with nothing changed.
        """
        buckets = self._divide(unit, segments)
        nbytes = sum(bucket.nbytes for bucket in buckets)
        self._store.reserve_space(2 * nbytes if self._store.durable else nbytes, scratch=not self._store.durable)
        made: list[str] = []
        try:
            for bucket in buckets:
                self._write(bucket)
                made.append(bucket.key)
        except BaseException:
            self._store.working_set.delete(made)
            raise
        self.buckets[unit] += buckets
        self._managed.append(list(segments))
        self.steps |= dict.fromkeys(segments, 0)

    def follow(self, unit: Unit, old: UnitLayout) -> None:
        """``unit``, which lay as ``old`` says, was laid out anew: bring its state to where its elements are; blocks.

        Over ranks an element may have moved to another's shard, and takes the bytes of its state along. On one rank all
        stays where it is.
        """
        if old.world == 1:
            return
        places = {spec.name: place for spec, place in zip(old.specs, old.places, strict=True)}
        whole = self._whole_fields(unit, old, places)
        self._store.working_set.delete([bucket.key for bucket in self.buckets[unit]])
        self.buckets[unit].clear()
        for segments in self._managed:
            self.buckets[unit] += self._divide(unit, segments)
        for bucket in self.buckets[unit]:
            self._write(bucket)
            with leased(self._store, bucket.key, "rw") as state:
                for piece in bucket.pieces:
                    place = places[piece.segment.name]
                    first = place.offset // piece.segment.dtype.itemsize + piece.start
                    views = zip(piece.layout.fields, piece.views(state), whole[place.span], strict=True)
                    for field, view, values in views:
                        view.copy_(values[first // field.numel_per_entry :][: view.numel()])
                    del view, views  # lifetime: as everywhere, before the lease
                del state

    def _whole_fields(self, unit: Unit, old: UnitLayout, places: Mapping[str, Place]) -> dict[int, list[torch.Tensor]]:
        """Gather the state of ``unit``, laid out as its parameters are: by span, an array of each field, all ranks'."""
        whole: dict[int, list[torch.Tensor]] = {}
        for number, span in enumerate(old.spans):
            if not any(places[segment.name].span == number for segment in self.steps if segment.unit is unit):
                continue  # never trained; a parameter that was frozen since has its state
            fields = self._layouts.of(span.dtype).fields
            numel = span.shard_nbytes // span.dtype.itemsize
            shards = [torch.zeros(f.length(numel), dtype=f.dtype, device="cpu") for f in fields]
            for bucket in self.buckets[unit]:
                with leased(self._store, bucket.key, "r") as state:
                    for piece in bucket.pieces:
                        place = places[piece.segment.name]
                        if place.span == number:
                            first = place.offset // span.dtype.itemsize + piece.start - unit.comm.rank * numel
                            for field, shard, view in zip(fields, shards, piece.views(state), strict=True):
                                shard[first // field.numel_per_entry :][: view.numel()].copy_(view)
                            del view
                    del state
            gathered = unit.comm.all_gather([shard.view(torch.uint8) for shard in shards])
            whole[number] = [each.view(field.dtype) for field, each in zip(fields, gathered, strict=True)]
        return whole

    def adopt(self) -> None:
        """Use the buckets that the store holds already; reserve the space that the second extent sets will take.

        Raises UsageError where the store lacks one.
        """
        refuse_missing(self._store, (bucket.key for buckets in self.buckets.values() for bucket in buckets))
        self._store.reserve_space(self._parameter_nbytes + self.nbytes)

    def create(self, masters: Masters | None) -> None:
        """Write every bucket: moments of zero, and the ``masters`` that ``shard`` has left, which are deleted."""
        left = set() if masters is None else set(masters.units())
        nbytes = sum(masters_nbytes(unit.segments) for unit in left)
        if self._store.durable:  # two sets of all, but for the masters, whose space becomes the state's
            self._store.reserve_space(self._parameter_nbytes + 2 * self.nbytes - nbytes)
        else:
            self._store.reserve_space(max(0, self.nbytes - nbytes), scratch=True)
        for unit, buckets in self.buckets.items():
            if masters is None or not isinstance(unit, Unit) or unit not in left:
                for bucket in buckets:
                    self._write(bucket)
            else:
                with leased(self._store, master_key(unit.name), "r", torch.float32) as values:
                    for bucket in buckets:
                        self._write(bucket, values)
                    del values  # lifetime: before the lease
                masters.delete(unit)

    def _write(self, bucket: Bucket[Segment], masters: torch.Tensor | None = None) -> None:
        """Write a fresh ``bucket``: moments of zero, and of the ``masters`` of its unit, if any, its own."""
        working_set = self._store.working_set
        working_set.create(bucket.key, bucket.nbytes)
        try:
            lease = working_set.lease(bucket.key, "w")
        except BaseException:
            working_set.delete([bucket.key])
            raise
        try:
            lease.tensor.zero_()
            if masters is not None:
                self._keep_masters(bucket, lease.tensor, masters)
        finally:
            lease.release()
        working_set.swap_out([bucket.key])

    def _keep_masters(self, bucket: Bucket[Segment], state: torch.Tensor, masters: torch.Tensor) -> None:
        """Keep the bits of the masters that the parameters lack; ``state`` is the bucket's bytes."""
        offsets = offsets_of(bucket.pieces[0].segment.unit.segments)
        for piece in bucket.pieces:
            if piece.segment in offsets:  # or the parameter is its own master
                start = offsets[piece.segment] + piece.start - piece.segment.stretch.start
                for tile, first, last in self._tiles(piece, state):
                    self._attach(tile, masters[start + first : start + last], None)

    def _tiles(self, piece: Piece[Segment], state: torch.Tensor) -> Iterator[tuple[Tile, int, int]]:
        """Yield the tiles of ``piece`` and their bounds in elements of it; ``state`` is the bucket's bytes."""
        views = piece.views(state)
        numel = piece.layout.tile_numel(self._scratch)
        for start in range(0, piece.numel, numel):
            stop = min(start + numel, piece.numel)
            yield piece.layout.tile(views, start, stop), start, stop

    def _attach(self, tile: Tile, master: torch.Tensor, hi: torch.Tensor | None) -> None:
        """Keep the bits of ``master`` (fp32) that ``hi``, the parameter, lacks; None stands for torch's rounding."""
        rows = tile.rows(self._scratch)
        rows.master[: master.numel()].copy_(master)
        if hi is None:
            hi = rows.gradient.view(torch.bfloat16)[: master.numel()].copy_(master)
        tile.attach_master(hi, rows)

    # -- one parameter --------------------------------------------------------------------------------------------

    def count(self, segment: Segment, values: Mapping[str, Any]) -> Hyperparameters:
        """Count one more update of ``segment`` and return its hyperparameters, with these frozen ``values``."""
        self.steps[segment] += 1
        begins = segment not in self.begun and self._layouts.rule.makes_moments(values)
        if begins:
            self.begun.add(segment)
        return Hyperparameters(self.steps[segment], values, begins)

    def is_worth_keeping(self, segment: Segment) -> bool:
        """Return whether a state_dict must have the state: a master is more than the parameter before any update."""
        steps = self.steps.get(segment)
        return bool(steps) or (steps == 0 and self._layouts.of(segment.dtype).master is not None)

    def gather_all(self, segments: Mapping[int, Segment]) -> dict[int, dict[str, torch.Tensor]]:
        """Return the state of those of ``segments`` that a state_dict must have: copies in a file where they are large.

        Raises CapacityError where neither the store's drives nor memory have room.
        """
        kept = {index: segment for index, segment in segments.items() if self.is_worth_keeping(segment)}
        nbytes = []
        for segment in kept.values():
            num_tensors = len(self._names) + (self._layouts.of(segment.dtype).master is not None)
            nbytes += [segment.numel * (8 if segment.dtype == torch.float64 else 4)] * num_tensors
        next_step = "store.commit() keeps the state, and store.resume() brings it back"
        devices = self._store.working_set.space.devices
        memory = memory_for_copies(devices, nbytes, "optimizer.state_dict()", next_step)
        with contextlib.closing(memory) if memory is not None else contextlib.nullcontext():
            return {index: self.gather(segment, memory) for index, segment in kept.items()}

    def gather(self, segment: Segment, memory: FileMemory | None = None) -> dict[str, torch.Tensor]:
        """Return step, the rule's moments and, for bf16, master: copies with the parameter's shape and strides.

        They lie in ``memory``, or in ordinary memory. Over several ranks all of them call this together.
        """
        with self._store.working_set.mark:
            empty = functools.partial(torch.empty_strided, device="cpu") if memory is None else memory.empty
            dtype = self.dtype_of(segment)
            has_moments = segment in self.begun or self._layouts.rule.name != "SGD"  # as torch: others begin with zeros
            names = (self._names if has_moments else []) + ["master"] * self.has_master(segment)
            flats = {name: empty((segment.numel,), (1,), dtype=dtype) for name in names}
            self._fill(segment, flats, range(segment.numel))
            if segment.unit.world > 1:
                _fill_from_all(segment, list(flats.values()))
            shaped = {name: flat.as_strided(segment.shape, segment.strides) for name, flat in flats.items()}
            step = torch.tensor(float(self.steps[segment]), dtype=torch.float32, device="cpu")
            return {"step": step, **shaped}

    def dtype_of(self, segment: Segment) -> torch.dtype:
        """Return the dtype of moments and masters as ``gather`` and ``read`` return them."""
        return torch.float64 if segment.dtype == torch.float64 else torch.float32

    def has_master(self, segment: Segment) -> bool:
        """Return whether the parameter is not its own master."""
        return self._layouts.of(segment.dtype).master is not None

    def read(self, segment: Segment, elements: range, name: str) -> torch.Tensor:
        """Return a moment, or "master", of ``elements``, in memory order, of this rank's shard: a copy, (numel,)."""
        flat = torch.empty(len(elements), dtype=self.dtype_of(segment), device="cpu")
        with self._store.working_set.mark:
            self._fill(segment, {name: flat}, elements)
        return flat

    def _fill(self, segment: Segment, flats: Mapping[str, torch.Tensor], elements: range) -> None:
        """Fill ``flats``, which have ``elements``, with the values that lie in this rank's shard."""
        layout, first = self._layouts.of(segment.dtype), segment.stretch.start
        with self._readable(segment) as hi:
            for tile, start, stop in self._stretches(segment, "r", elements):
                rows, own = tile.rows(self._scratch), hi[start - first : stop - first]
                values = dict(zip(self._names, tile.decode_moments(rows), strict=True))
                marked = None if layout.marks is None else self._names[layout.marks]
                if marked is not None and not flats.keys().isdisjoint((marked, "master")):
                    # lifetime: the copy loses its marks, not the leased bytes
                    values[marked] = tile.master[-1] = values[marked].clone()
                if "master" in flats or marked in flats:
                    values["master"] = tile.decode_master(own, rows)
                begin, end = max(start, elements.start), min(stop, elements.stop)
                for name, flat in flats.items():  # all moments, or none
                    part = flat[begin - elements.start : end - elements.start]
                    part.copy_(values[name][begin - start : end - start])
                    if name == "master":
                        part.masked_fill_(own[begin - start : end - start].isnan(), torch.nan)  # a NaN moment: any sign
                tile = own = values = None  # type: ignore[assignment]  # lifetime: the lease ends before the next

    def check_master(self, segment: Segment, state: Mapping[str, Any] | None) -> None:
        """Raise UsageError for a master in ``state`` whose rounding is not the parameter as it is now."""
        with self._store.working_set.mark:
            if not state or "master" not in state or self._layouts.of(segment.dtype).master is None:
                return
            master = _in_memory_order(segment, state["master"])[segment.stretch.start : segment.stretch.stop]
            with self._readable(segment) as hi:
                for start in range(0, len(segment.stretch), _CHECKED_NUMEL):
                    mine, theirs = hi[start : start + _CHECKED_NUMEL], master[start : start + _CHECKED_NUMEL]
                    if not rounds_to(mine, theirs):
                        raise UsageError(
                            f"load_state_dict: the masters given for parameter {segment.name} are not those of its"
                            " values; nothing was changed. Load the model's state first, then the optimizer's"
                        )
                    mine = None  # type: ignore[assignment]  # lifetime: nothing may see the leased bytes at the end

    def scatter(self, segment: Segment, state: Mapping[str, Any] | None) -> None:
        """Replace the state by one that ``gather`` returned, or by that of a fresh parameter (None).

        A state without step counts, as torch's SGD has it, counts as one update where it has moments.
        """
        with self._store.working_set.mark:
            flats = {
                name: _in_memory_order(segment, state[name])
                for name in (*self._names, "master")
                if state and state.get(name) is not None
            }
            steps = int(float(state["step"])) if state and "step" in state else int(bool(flats))
            self.write(segment, steps, {name: flat.__getitem__ for name, flat in flats.items()})

    def write(self, segment: Segment, steps: int, values: Mapping[str, Callable[[slice], torch.Tensor]]) -> None:
        """Replace the state of what lies in this rank's shard; ``values`` give a slice of the elements in memory order.

        Moments without values become zeros, and a master without becomes the parameter.
        """
        with self._store.working_set.mark:
            self.steps[segment] = steps
            if steps and all(name in values for name in self._names):
                self.begun.add(segment)
            else:
                self.begun.discard(segment)
            layout, first = self._layouts.of(segment.dtype), segment.stretch.start
            self._scratch.dither.aim_at_nearest()
            with self._readable(segment) as hi:
                for tile, start, stop in self._stretches(segment, "rw"):
                    rows, its = tile.rows(self._scratch), slice(start - first, stop - first)
                    moments = tile.decode_moments(rows)  # only to be overwritten
                    for name, moment in zip(self._names, moments, strict=True):
                        moment.copy_(values[name](slice(start, stop))) if name in values else moment.zero_()
                    for moment, kind in zip(moments, self._layouts.rule.moments, strict=True):
                        if kind.is_positive:
                            moment.abs_()  # the sign of a zero or a NaN would be a mark
                    tile.encode_moments(moments, rows, self._scratch)
                    if layout.master is not None:
                        has = "master" in values
                        master = values["master"](slice(start, stop)) if has else hi[its].float()
                        self._attach(tile, master, hi[its])
                    tile = moment = moments = None  # type: ignore[assignment]  # lifetime: as above

    def reset(self, segment: Segment) -> None:
        """Make the moments and the step count of ``segment`` zero; the master stays."""
        with self._store.working_set.mark:
            if segment not in self.steps:
                return
            self.steps[segment] = 0
            self.begun.discard(segment)
            for tile, _, _ in self._stretches(segment, "rw"):
                tile.clear_moments()
                tile = None  # type: ignore[assignment]  # lifetime: as above

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        if segment.dtype != torch.bfloat16:
            return  # order: before a copy
        master = None
        if source is not None and source.dtype in {torch.float32, torch.float64} and source.shape == segment.shape:
            master = _in_memory_order(segment, source.float()).__getitem__
        self.fill_master(segment, master)

    def fill_master(self, segment: Segment, values: Callable[[slice], torch.Tensor] | None) -> None:
        """The same, of what lies in this rank's shard; ``values`` give a slice of the elements in memory order."""
        with self._store.working_set.mark:
            if segment.dtype != torch.bfloat16 or segment not in self.steps:
                return
            for tile, start, stop in self._stretches(segment, "rw"):
                tile.clear_master()
                if values is not None:
                    self._attach(tile, values(slice(start, stop)), None)
                tile = None  # type: ignore[assignment]  # lifetime: as above

    def _stretches(
        self, segment: Segment, mode: Mode, elements: range | None = None
    ) -> Iterator[tuple[Tile, int, int]]:
        """Yield the tiles of ``segment``'s state, leased in ``mode`` meanwhile, and their bounds in elements of it.

        Of ``elements``, if given, those that have some of them.
        """
        low, high = (0, segment.numel) if elements is None else (elements.start, elements.stop)
        for bucket in self.buckets[segment.unit]:
            for piece in bucket.pieces:
                if piece.segment is segment and piece.start < high and piece.start + piece.numel > low:
                    with leased(self._store, bucket.key, mode) as state:
                        for tile, start, stop in self._tiles(piece, state):
                            if piece.start + start < high and piece.start + stop > low:
                                yield tile, piece.start + start, piece.start + stop
                            del tile  # lifetime: nothing may see the leased bytes when the lease ends
                        del state

    @contextlib.contextmanager
    def _readable(self, segment: Segment) -> Iterator[torch.Tensor]:
        """Lease the parameter's values in this rank's shard: (len(stretch),) in memory order."""
        if isinstance(segment, PlainSegment):
            yield segment.memory()
            return
        with leased(self._store, segment.unit.keys[segment.span], "r") as span:
            flat = segment.piece(span)
            del span
            yield flat
            del flat


def _fill_from_all(segment: Segment, flats: Sequence[torch.Tensor]) -> None:
    """Fill ``flats``, (numel,) each, with what the ranks have of them: each has its own stretch of ``segment``."""
    unit = segment.unit
    number = unit.segments.index(segment)
    every = [
        (rank, each) for rank in range(unit.world) for each in unit.layout.stretches(rank) if each.number == number
    ]
    most, own = max((each.stop - each.start for _, each in every), default=0), segment.stretch
    pieces = [torch.zeros(most, dtype=flat.dtype, device="cpu") for flat in flats if most]
    for piece, flat in zip(pieces, flats, strict=False):
        piece[: len(own)].copy_(flat[own.start : own.stop])
    whole = unit.comm.all_gather([piece.view(torch.uint8) for piece in pieces])
    for flat, each in zip(flats, whole, strict=False):
        found = each.view(flat.dtype).view(unit.world, -1)
        for rank, (_, start, stop, *_) in every:
            flat[start:stop].copy_(found[rank, : stop - start])


def rounds_to(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    """Return whether each of ``master``'s values is next to the bf16 one of ``parameter``, or both are NaN."""
    theirs = master.float()
    lo = theirs.view(torch.int32) - (parameter.view(torch.int16).to(torch.int32) << 16)
    fits = (lo.abs_() <= 1 << 15).logical_or_(parameter.isnan().logical_and_(theirs.isnan()))
    return bool(fits.all())


def _in_memory_order(segment: Segment, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``'s elements in the order in which ``segment`` keeps them: (numel,)."""
    ordered = torch.empty_strided(segment.shape, segment.strides, dtype=value.dtype, device="cpu")
    ordered.copy_(value)
    return ordered.as_strided((segment.numel,), (1,))
