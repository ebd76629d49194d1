"""Reshard: a run that N ranks have committed becomes the first generation of M ranks, from what it says of itself.

No program of the run is needed. The offsets of segments in a span do not depend on the number of ranks, so the new
shards are other cuts of the same bytes; a bucket is laid out anew, and each field of its pieces is copied. Nothing is
decoded, so N -> M -> N gives the same bytes. Each rank reads what its own shards need from the stores of all old ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tiered.errors import CapacityError, UsageError
from tiered.ranks.group import machine_of
from tiered.store.catalog.catalog import Alone, GenerationName
from tiered.store.format.state_text import encode
from tiered.store.generations.registry import committed_state, taking_apart
from tiered.store.lifetime.opening import MIN_DRAM_NBYTES, new_arena, open_parts
from tiered.store.lifetime.rank_sets import RankSet, find_sets, newest_of, stores_in
from tiered.store.residency.entry import Record
from tiered.store.store import Store
from tiered.units import MiB, format_bytes, round_up
from tiered.zero.formats.codec import Bucket, Piece, divide
from tiered.zero.formats.rules import AdamWRule, LionRule, Rule, SGDRule
from tiered.zero.formats.state_layout import Layouts
from tiered.zero.layout import CUT_NUMEL, UnitLayout, bucket_numel_for, committed_layouts, count_in, lay_out, text_in

__all__ = ["carry_over", "opened_ranks", "read_span"]

_WORD = "tiered.Store with another number of ranks"
_SLICE_NBYTES = 4 * MiB
_PLAIN = "model/state/plain/"  # the state of parameters beside the sharded ones, whole on each rank
_RULES: dict[str, Rule] = {
    "AdamW": AdamWRule(),
    "Lion": LionRule(),
    "SGD": SGDRule(with_momentum=True),
    "SGD without momentum": SGDRule(with_momentum=False),
}
_log = logging.getLogger("tiered")


class _Segment(NamedTuple):
    """A committed parameter, and its ``stretch`` in the shards of one rank."""

    name: str
    dtype: torch.dtype
    stretch: range


class _Unit(NamedTuple):
    """A unit as each rank of a set has it: by rank, its segments; empty stretches included."""

    name: str
    segments: tuple[tuple[_Segment, ...], ...]

    @classmethod
    def of(cls, layout: UnitLayout) -> _Unit:
        """Return the unit of ``layout``."""
        return cls(layout.name, tuple(_segments(layout, rank) for rank in range(layout.world)))


def _segments(layout: UnitLayout, rank: int) -> tuple[_Segment, ...]:
    stretches = {each.number: range(each.start, each.stop) for each in layout.stretches(rank)}
    return tuple(
        _Segment(spec.name, spec.dtype, stretches.get(number, range(0))) for number, spec in enumerate(layout.specs)
    )


@contextmanager
def carry_over(
    store: Store, origin: RankSet, *, external: Sequence[str | os.PathLike[str]], engine: str
) -> Iterator[str]:
    """Write this rank's part of the run of ``origin`` to ``store``, which is new; lend the text of its first commit.

    Until the block ends, after that commit, nobody else can open the old stores to write: what they came to have
    meanwhile would be lost with the switch. All ranks call it together; it blocks. ``external`` are the user's files
    that some of it lies in. In memory it takes the budget of ``store``, 8 MiB for each old rank, and a bucket. A frozen
    parameter that is read in place is written. Random states and states of registered objects are those of the same
    rank, and those of rank 0 for ranks that are new, with random states of their own. Raises UsageError for keys of the
    caller's own that no rank would have, CapacityError where there is no space for both sets, before any byte is
    written.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(_opened(each, origin.generation, external, engine)) for each in origin.stores]
        origin.check_unchanged()  # order: once nobody else can commit to them
        with taking_apart(f"{origin.world} ranks", by="reader"):
            plan = _Plan(store, sources)
        plan.check_space()
        if not plan.rank:
            _log.warning(
                "the run of %s is carried over to %d: this one, 0, writes %s; `tiered gc` removes the old stores",
                origin, plan.world, format_bytes(plan.nbytes),
            )  # fmt: skip
        plan.write()
        yield plan.text


@contextmanager
def _opened(
    directories: Sequence[Path], chosen: GenerationName | None, external: Sequence[str | os.PathLike[str]], engine: str
) -> Iterator[Store]:
    """Open the store of one rank to be read, at the generation that all have; None: at its newest."""
    arena = new_arena(MIN_DRAM_NBYTES, serves_accelerator=False)
    confirmation = Alone(chosen=chosen)
    parts = open_parts(
        directories, arena, durable=True, engine=engine, mode="r", external=external, confirmation=confirmation
    )
    store = Store._from_parts(parts, mode="r")
    try:
        yield store
    finally:
        store.close(commit=False)


@contextmanager
def opened_ranks(
    directories: Sequence[Path], external: Sequence[str | os.PathLike[str]] = (), engine: str = "auto"
) -> Iterator[list[Store]]:
    """Open the stores of the run in ``directories`` to be read: that of each rank, in their order, or the only one.

    Each has a budget of 8 MiB. Raises UsageError, CorruptionError, DeviceError.
    """
    stores = stores_in(directories)
    current = newest_of(find_sets([*map(Path, directories)])) if len(stores) > 1 else None
    chosen = None if current is None else current.generation
    with ExitStack() as stack:
        yield [stack.enter_context(_opened(each, chosen, external, engine)) for each in stores]


def read_span(sources: Sequence[Store], key: str, shard_nbytes: int, start: int, out: torch.Tensor) -> None:
    """Fill ``out``, (nbytes,) uint8, with the bytes from ``start`` on of a whole span, whose shards ``sources`` have.

    Bytes behind the whole span are left as they are.
    """
    for at in range(0, len(out), _SLICE_NBYTES):
        stop = min(at + _SLICE_NBYTES, len(out))
        for rank, source in enumerate(sources):
            begin = rank * shard_nbytes
            first, last = max(start + at, begin), min(start + stop, begin + shard_nbytes)
            if first < last:
                out[first - start : last - start] = source.read_part(key, first - begin, last - begin)


class _Plan:
    """The keys that this rank is to write: the bytes of each, and how it is filled."""

    def __init__(self, store: Store, sources: Sequence[Store]) -> None:
        """Raises UsageError, and what ``taking_apart`` translates for a state that no version writes."""
        self._store, self._sources = store, sources
        ranks = store.ranks
        self.rank, self.world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        self.generation = sources[0].generation
        self._fills: dict[str, tuple[int, Callable[[torch.Tensor], None]]] = {}
        self._second_nbytes = 0  # of the second set of what is trained
        self._last_read: tuple[int, str, torch.Tensor] | None = None
        own = sources[self.rank if self.rank < len(sources) else 0]
        first = committed_state(sources[0]._generations.root.state)[1]
        user, states = committed_state(own._generations.root.state)
        model, optimizer = first.get("tiered.model"), first.get("tiered.optimizer")
        pairs: list[tuple[_Unit, _Unit]] = []
        if model is not None:
            layouts = [layout for _, layout in committed_layouts(model)]
            for layout in layouts:
                new = lay_out(layout.name, layout.specs, self.world)
                self._add_spans(layout, new)
                pairs.append((_Unit.of(layout), _Unit.of(new)))
                self._add_masters(*pairs[-1], set(map(text_in, model["trained_first"][layout.name])))
            states["tiered.model"] = {**model, "world": self.world}
        if optimizer is not None:
            numel = self._add_state(pairs, optimizer)
            states["tiered.optimizer"] = {**optimizer, "bucket_numel": numel}
        if self.rank >= len(sources) and "tiered.random" in states:
            states["tiered.random"] = _seeded(states["tiered.random"], self.rank)
        self._own = self._keys_of_the_callers()
        texts = [f"{encode(name)}:{encode(state, name=name)}" for name, state in states.items()]
        self.text = f'{{"registered":{{{",".join(texts)}}},"state":{encode(user)}}}'

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        own = sum(record.nbytes for record in self._own)
        return own + sum(nbytes for nbytes, _ in self._fills.values())

    # -- what is to be written ------------------------------------------------------------------------------------

    def _add_spans(self, old: UnitLayout, new: UnitLayout) -> None:
        for before, after in zip(old.spans, new.spans, strict=True):

            def fill(out: torch.Tensor, key: str = before.key, shard: int = before.shard_nbytes) -> None:
                read_span(self._sources, key, shard, self.rank * len(out), out)

            self._fills[after.key] = after.shard_nbytes, fill
            self._second_nbytes += after.shard_nbytes if after.trainable else 0

    def _add_masters(self, old: _Unit, new: _Unit, trained: set[str]) -> None:
        """Masters that no optimizer has taken over yet: fp32 values, one segment after the other."""
        key = f"model/master/{old.name}"
        if not any(key in source for source in self._sources):
            return
        places = [_master_places(old.segments[rank], trained) for rank in range(len(old.segments))]
        mine = _master_places(new.segments[self.rank], trained)

        def fill(out: torch.Tensor) -> None:
            for segment, offset in mine.items():
                for rank, theirs in enumerate(places):
                    for other, start in theirs.items():
                        first = max(segment.stretch.start, other.stretch.start)
                        last = min(segment.stretch.stop, other.stretch.stop)
                        if other.name == segment.name and first < last:
                            at, to = start + first - other.stretch.start, offset + first - segment.stretch.start
                            part = self._sources[rank].read_part(key, 4 * at, 4 * (at + last - first))
                            out[4 * to : 4 * (to + last - first)] = part

        nbytes = max((4 * (offset + len(segment.stretch)) for segment, offset in mine.items()), default=0)
        self._fills[key] = nbytes, fill

    def _add_state(self, pairs: Sequence[tuple[_Unit, _Unit]], optimizer: Mapping[str, Any]) -> int:
        """Add the buckets of all units; return how many elements a new bucket has at most."""
        layouts = Layouts(text_in(optimizer["state"]), _RULES[text_in(optimizer["class"])], sizes_only=True)
        managed = [list(map(text_in, names)) for names in optimizer["managed"]]
        before, start = count_in(optimizer["bucket_numel"]), set(managed[0])
        numels = [
            -(-sum(len(s.stretch) for each in new.segments for s in each if s.name in start) // self.world)
            for _, new in pairs
        ]
        whole = [record for record in self._sources[0].records() if record.name.startswith(_PLAIN)]
        numel = before if whole else bucket_numel_for(numels)  # plain parameters, whose sizes no commit has
        for record in whole:

            def copy(out: torch.Tensor, key: str = record.name) -> None:
                out.copy_(self._sources[0].read_part(key, 0, len(out)))

            self._fills[record.name] = record.nbytes, copy
            self._second_nbytes += record.nbytes
        for old, new in pairs:
            places: dict[str, list[tuple[int, str, Piece[_Segment]]]] = {}
            for rank in range(len(old.segments)):
                for bucket in _buckets(old.name, old.segments[rank], managed, before, layouts):
                    for piece in bucket.pieces:
                        places.setdefault(piece.segment.name, []).append((rank, bucket.key, piece))
            for bucket in _buckets(new.name, new.segments[self.rank], managed, numel, layouts):

                def fill(
                    out: torch.Tensor,
                    bucket: Bucket[_Segment] = bucket,
                    places: Mapping[str, Sequence[tuple[int, str, Piece[_Segment]]]] = places,
                ) -> None:
                    self._read_bucket(bucket, places, out)

                self._fills[bucket.key] = bucket.nbytes, fill
                self._second_nbytes += bucket.nbytes
        return numel

    def _read_bucket(
        self,
        bucket: Bucket[_Segment],
        places: Mapping[str, Sequence[tuple[int, str, Piece[_Segment]]]],
        out: torch.Tensor,
    ) -> None:
        for piece in bucket.pieces:
            views = piece.views(out)
            for rank, key, old in places[piece.segment.name]:
                first, last = max(piece.start, old.start), min(piece.stop, old.stop)
                if first < last:
                    theirs = old.views(self._whole(rank, key))
                    for field, view, values in zip(piece.layout.fields, views, theirs, strict=True):
                        to, at = ((first - each.start) // field.numel_per_entry for each in (piece, old))
                        length = field.length(last - first)
                        view[to : to + length] = values[at : at + length]

    def _whole(self, rank: int, key: str) -> torch.Tensor:
        """Return the bytes of an old bucket: (nbytes,) uint8; those of the last one are kept."""
        if self._last_read is None or self._last_read[:2] != (rank, key):
            self._last_read = None  # lifetime: one at a time
            nbytes = next(record.nbytes for record in self._sources[rank].records() if record.name == key)
            self._last_read = rank, key, self._sources[rank].read_part(key, 0, nbytes)
        return self._last_read[2]

    def _keys_of_the_callers(self) -> list[Record]:
        """Return the records of the keys of the caller's own, which stay with their rank."""
        others = [
            (rank, record)
            for rank, source in enumerate(self._sources)
            for record in source.records()
            if not record.name.startswith("model/")
        ]
        lost = [f"{record.name!r} of rank {rank}" for rank, record in others if rank >= self.world]
        if lost:
            raise UsageError(
                f"keys of the caller's own that no rank would have, over {self.world} in place of"
                f" {len(self._sources)}: {', '.join(lost[:5])}{', ...' * (len(lost) > 5)}; expected them in rank 0's"
                " store, or deleted: open it with as many ranks as committed it"
            )
        return [record for rank, record in others if rank == self.rank]

    # -- writing --------------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """Raise CapacityError, on all ranks, where the drives have no space for two sets of what is trained."""
        ranks, devices = self._store.ranks, self._store.working_set.space.devices
        needed = (self.nbytes + self._second_nbytes) // len(devices)
        drives = [
            hashlib.blake2b(
                f"{machine_of(self.rank)} {os.stat(device.name).st_dev}".encode(), digest_size=6
            ).hexdigest()
            for device in devices
        ]
        told = [" ".join((str(needed), *drives))]
        if ranks is not None:
            told = list(ranks.agreement.agree(_WORD, told[0]))
        for device, drive in zip(devices, drives, strict=True):
            together = sum(int(each.split()[0]) * each.split()[1:].count(drive) for each in told)
            status = os.statvfs(device.name)
            if together > (free := status.f_bavail * status.f_frsize):
                raise CapacityError(
                    f"{device.name} has {format_bytes(free)} ({free:,} bytes) free, and the run over {self.world} ranks"
                    f" needs {format_bytes(together)} ({together:,} bytes) there, beside that over"
                    f" {len(self._sources)}, which stays until it is carried over; nothing was written: free some"
                    f" space, or go on with {len(self._sources)} ranks"
                )

    def write(self) -> None:
        """Write all keys."""
        working_set = self._store.working_set
        for key, (nbytes, fill) in self._fills.items():
            if not nbytes:
                continue
            working_set.create(key, nbytes)
            lease = working_set.lease(key, "w")
            try:
                lease.tensor.zero_()
                fill(lease.tensor)
            finally:
                lease.release()
            working_set.swap_out([key])
        for record in self._own:
            source = self._sources[self.rank]
            entry = source.working_set.idle_entry(record.name, "carry over")
            assert entry is not None
            self._store.put(record.name, source[record.name], block_size=entry.spec.block_nbytes)


def _buckets(
    unit: str, segments: Sequence[_Segment], managed: Sequence[Sequence[str]], numel: int, layouts: Layouts
) -> list[Bucket[_Segment]]:
    """Return the buckets of one rank's part of a unit, as ``OptimizerState.lay_out`` divides it."""
    buckets: list[Bucket[_Segment]] = []
    for names in managed:
        its = [segment for segment in segments if segment.name in names]
        buckets += divide(f"model/state/{unit}", its, numel, layouts, first=len(buckets))
    return buckets


def _master_places(segments: Iterable[_Segment], trained: set[str]) -> dict[_Segment, int]:
    """Return where, in elements, the masters of one rank's segments lie, as ``offsets_of`` has them."""
    places: dict[_Segment, int] = {}
    offset = 0
    for segment in segments:
        if segment.dtype == torch.bfloat16 and segment.name in trained and segment.stretch:
            places[segment] = offset
            offset += round_up(len(segment.stretch), CUT_NUMEL)
    return places


def _seeded(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return random states for a ``rank`` that is new, seeded by rank 0's ``state`` and its number.

    Generators of accelerators go on as they are.
    """
    digest = hashlib.blake2b(bytes(state["torch"].tolist()) + rank.to_bytes(8, "little"), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    name, keys, position, has_gauss, gauss = np.random.RandomState(seed % (1 << 32)).get_state(legacy=True)
    version, words, next_gauss = random.Random(seed).getstate()
    return {
        "torch": torch.Generator(device="cpu").manual_seed(seed).get_state(),
        "accelerators": {},
        "numpy": (str(name), keys, int(position), int(has_gauss), float(gauss)),
        "python": (version, np.array(words, dtype=np.uint32), next_gauss),
    }
