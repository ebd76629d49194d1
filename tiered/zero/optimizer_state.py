"""The optimizer's state as it lies in the store: buckets per unit, created, read out and replaced.

Where each element is and how it gets there; when it is updated is the optimizer's business, the bytes codec.py's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from tiered.store.lease import Mode
from tiered.store.store import Store
from tiered.zero.codec import Bucket, Fields, TileScratch, decode_master, divide, encode_master
from tiered.zero.masters import master_key, master_offsets, masters_nbytes
from tiered.zero.plain import PlainSegment, PlainUnit
from tiered.zero.unit import Segment, Unit

__all__ = ["OptimizerState", "StateUnit"]

StateUnit = Unit | PlainUnit


class OptimizerState:
    """The buckets of every unit. ``steps`` counts the updates of each segment that has state.

    ``scratch`` is lent by the update pipeline, which runs at other times. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[StateUnit],
        managed: Collection[Segment],
        *,
        bucket_numel: int,
        scratch: TileScratch,
    ) -> None:
        self.bucket_numel = bucket_numel
        self.buckets: dict[StateUnit, list[Bucket]] = {}
        self.steps: dict[Segment, int] = {}
        self._store = store
        self._parameter_nbytes = sum(unit.nbytes for unit in units if isinstance(unit, Unit))
        self._scratch = scratch
        for unit in units:
            segments = [segment for segment in unit.segments if segment in managed]
            self.buckets[unit] = divide(f"model/state/{unit.name}", segments, bucket_numel)
            self.steps |= dict.fromkeys(segments, 0)

    def __repr__(self) -> str:
        return f"OptimizerState({len(self.steps)} parameters, {self.nbytes} B)"

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.nbytes for buckets in self.buckets.values() for bucket in buckets)

    def adopt(self) -> None:
        """Use the buckets that the store holds already; reserve what the second extent sets will take."""
        self._store.reserve_space(self._parameter_nbytes + self.nbytes)

    def create(self) -> None:
        """Write every bucket: moments of zero, the masters that ``shard`` has left, which are deleted."""
        units = [unit for unit in self.buckets if master_key(unit.name) in self._store]
        masters = sum(masters_nbytes(unit.segments) for unit in units)
        if self._store.durable:  # two sets of all, but for the masters, whose space becomes the state's
            self._store.reserve_space(self._parameter_nbytes + 2 * self.nbytes - masters)
        else:
            self._store.reserve_space(max(0, self.nbytes - masters), scratch=True)
        for unit, buckets in self.buckets.items():
            self._create(unit, buckets)

    def _create(self, unit: StateUnit, buckets: Sequence[Bucket]) -> None:
        working_set = self._store.working_set
        key = master_key(unit.name)
        masters = working_set.lease(key, "r") if key in self._store else None
        offsets = master_offsets(unit.segments) if masters is not None else {}
        for bucket in buckets:
            working_set.create(bucket.key, bucket.nbytes)
            lease = working_set.lease(bucket.key, "w")
            try:
                lease.tensor.zero_()
                if masters is not None:
                    self._encode(bucket, lease.tensor, masters.tensor.view(torch.float32), offsets)
            finally:
                lease.release()
            working_set.swap_out([bucket.key])
        if masters is not None:
            masters.release()
            working_set.delete([key])

    def _encode(self, bucket: Bucket, state: torch.Tensor, masters: torch.Tensor, offsets: dict[Segment, int]) -> None:
        for piece in bucket.pieces:
            if piece.segment in offsets:
                start = offsets[piece.segment] + piece.start
                self._encode_piece(piece.fields(state), masters[start : start + piece.numel])

    def _encode_piece(self, fields: Fields, masters: torch.Tensor) -> None:
        """Write the remainders of ``masters`` (fp32) to ``fields``, tile by tile."""
        scratch = self._scratch
        for start in range(0, masters.numel(), scratch.numel):
            master = masters[start : start + scratch.numel]
            n = master.numel()
            tile = Fields(*(None if field is None else field[start : start + n] for field in fields))  # type: ignore[arg-type]
            rounded = scratch.gradient.view(torch.bfloat16)[:n]
            encode_master(master, rounded, tile, scratch.work[:n])

    # -- one parameter --------------------------------------------------------------------------------------------

    def gather(self, segment: Segment) -> dict[str, torch.Tensor]:
        """Return step, exp_avg, exp_avg_sq and, for bf16, master: copies with the parameter's shape and strides."""
        dtype = torch.float64 if segment.dtype == torch.float64 else torch.float32
        names = ["exp_avg", "exp_avg_sq"] + (["master"] if segment.dtype == torch.bfloat16 else [])
        flats = {name: torch.empty(segment.numel, dtype=dtype) for name in names}
        with self._readable(segment) as hi:
            for start, stop, fields in self._pieces(segment, "r"):
                exp_avg_sq = flats["exp_avg_sq"][start:stop].copy_(fields.exp_avg_sq)
                flats["exp_avg"][start:stop].copy_(fields.exp_avg)
                if fields.lo is not None:
                    copied = Fields(fields.lo, fields.exp_avg, exp_avg_sq)
                    work = torch.empty(stop - start, dtype=torch.int32)
                    decode_master(hi[start:stop], copied, flats["master"][start:stop], work)
                fields = None  # type: ignore[assignment]
        shaped = {name: flat.as_strided(segment.shape, segment.strides) for name, flat in flats.items()}
        return {"step": torch.tensor(float(self.steps[segment])), **shaped}

    def scatter(self, segment: Segment, state: dict[str, Any] | None) -> None:
        """Replace the state by what ``gather`` returned, or by that of a fresh parameter (None)."""
        self.steps[segment] = int(float(state["step"])) if state else 0
        flats = {
            name: _in_memory_order(segment, state[name])
            for name in ("exp_avg", "exp_avg_sq", "master")
            if state and name in state
        }
        master = flats.get("master")
        with self._readable(segment) as hi:
            if master is None and segment.dtype == torch.bfloat16:
                master = hi.float()
        for start, stop, fields in self._pieces(segment, "rw"):
            for field, name in ((fields.exp_avg, "exp_avg"), (fields.exp_avg_sq, "exp_avg_sq")):
                field.copy_(flats[name][start:stop]) if name in flats else field.zero_()
            if fields.lo is not None and master is not None:
                self._encode_piece(fields, master[start:stop])
            field = fields = None  # type: ignore[assignment]

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""
        if segment.dtype != torch.bfloat16 or segment not in self.steps:
            return
        master = None
        if source is not None and source.dtype in {torch.float32, torch.float64} and source.shape == segment.shape:
            master = _in_memory_order(segment, source.float())
        for start, stop, fields in self._pieces(segment, "rw"):
            fields.exp_avg_sq.view(torch.int32).bitwise_and_(0x7FFFFFFF)
            assert fields.lo is not None
            if master is None:
                fields.lo.zero_()
            else:
                self._encode_piece(fields, master[start:stop])
            fields = None  # type: ignore[assignment]

    def _pieces(self, segment: Segment, mode: Mode) -> Iterator[tuple[int, int, Fields]]:
        """Yield (start, stop, fields) of each stretch of ``segment``'s state, leased in ``mode`` meanwhile."""
        for bucket in self.buckets[segment.unit]:
            for piece in bucket.pieces:
                if piece.segment is segment:
                    lease = self._store.working_set.lease(bucket.key, mode)
                    try:
                        yield piece.start, piece.stop, piece.fields(lease.tensor)
                    finally:
                        lease.release()

    @contextlib.contextmanager
    def _readable(self, segment: Segment) -> Iterator[torch.Tensor]:
        """Lease the parameter's values: (numel,) in memory order."""
        if isinstance(segment, PlainSegment):
            yield segment.memory()
            return
        lease = self._store.working_set.lease(segment.unit.key, "r")
        try:
            yield segment.flat(lease.tensor)
        finally:
            lease.release()


def _in_memory_order(segment: Segment, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``'s elements in the order in which ``segment`` keeps them: (numel,)."""
    ordered = torch.empty_strided(segment.shape, segment.strides, dtype=value.dtype)
    ordered.copy_(value)
    return ordered.as_strided((segment.numel,), (1,))
