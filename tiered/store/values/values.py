"""Values: whole tensors in and out of the store, by copy; and keys whose bytes lie in the user's own files."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.host_tensor import address_of, copy_contiguous
from tiered.bytes.interrupt import INTERRUPTS, uninterrupted
from tiered.errors import UsageError
from tiered.store.format.checksum import MIN_BLOCK_SHIFT, block_digests
from tiered.store.format.row import INLINE_NBYTES, MAX_NUM_DIMS, ExternalRange, Row, Spec
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.records import adopted
from tiered.store.residency.lease import ReadPastError, refuse_modes
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import SLAB_NBYTES
from tiered.store.values.batches import GetBatches, PutBatches, PutSource
from tiered.store.values.parts import PartValues
from tiered.store.values.streaming import StreamedValues
from tiered.store.values.tensors import check_block, flat_of, plain_value, result_for
from tiered.store.waiting.deadline import Deadline
from tiered.units import MiB

__all__ = ["Values", "adopt"]


_LARGE_NBYTES = 8 * MiB  # from here on a put digests while it copies, and put_many has it written at once
_NUM_AHEAD = 64  # keys that get_many prefetches
_SMALLEST_BLOCK_NBYTES = 1 << MIN_BLOCK_SHIFT


_Digests = tuple[int, int, bytes]
"""A key id, a generation, and the digests under them."""


class Values:
    """put and get. Small tensors go to their row, ordinary ones through the working set, large ones are streamed."""

    def __init__(self, working_set: WorkingSet, streams: StreamedValues) -> None:
        self._working_set = working_set
        self._records = working_set.records
        self._condition = working_set.condition
        self._streams = streams
        self._parts = PartValues(working_set)
        self._put_batches = PutBatches(working_set, self._put_one_of_many)
        self._get_batches = GetBatches(working_set, self.get)

    @uninterrupted
    def put(self, key: str, value: torch.Tensor, block_nbytes: int | None = None) -> None:
        """Make a copy of ``value`` the tensor of ``key``; the last put wins. Readers see the old one or the new one.

        ``block_nbytes``: what has one digest; by default that of the tensor it replaces, if dtype and shape are the
        same. Raises TypeError for anything but a plain strided tensor, LeaseError, CapacityError, DeviceError.
        """
        self._put(key, value, is_one_of_many=False, block_nbytes=block_nbytes)

    def _put_one_of_many(self, key: str, value: torch.Tensor) -> None:
        self._put(key, value, is_one_of_many=True)

    def _put(self, key: str, value: torch.Tensor, *, is_one_of_many: bool, block_nbytes: int | None = None) -> None:
        self._working_set.check(writing=True)
        plain = plain_value(key, value)
        with self._working_set.mark:
            while not self._put_plain(key, plain, is_one_of_many=is_one_of_many, block_nbytes=block_nbytes):
                pass
            self._working_set.room.pump()

    def _put_plain(self, key: str, plain: torch.Tensor, *, is_one_of_many: bool, block_nbytes: int | None) -> bool:
        """Put it; False where a commit without it was asked for meanwhile, and all is to be done again."""
        self._working_set.deferred_seal.settle()
        spec = self._spec(key, plain, block_nbytes)
        if spec.nbytes <= INLINE_NBYTES:
            host = plain.cpu()
            content = ctypes.string_at(address_of(host), spec.nbytes) if spec.nbytes else b""
            return self._install(key, spec, content) is not None
        if self._streams.must_stream(spec.nbytes):
            self._streams.put(key, flat_of(plain), spec, scratch=not self._records.durable)
            return True
        entry = self._put_resident(key, plain, spec)
        if entry is None:
            return False
        if is_one_of_many and spec.nbytes >= _LARGE_NBYTES and entry.landing is None and not entry.held:
            self._working_set.room.write([entry], spec.nbytes)
        return True

    def _spec(self, key: str, plain: torch.Tensor, block_nbytes: int | None = None) -> Spec:
        """Return the looks of ``plain`` as the tensor of ``key``."""
        if block_nbytes is not None:
            check_block(f"put of {key!r}", block_nbytes, self._working_set.space.alignment)
            return Spec.like(plain, block_nbytes)
        spec = Spec.like(plain)
        if spec.nbytes > _SMALLEST_BLOCK_NBYTES:
            with self._condition:
                old = self._records.entries.peek(key)
            if old is not None and (old.spec.dtype_name, old.spec.shape) == (spec.dtype_name, spec.shape):
                return Spec.like(plain, old.spec.block_nbytes)
        return spec

    def read_part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the elements [start, stop) of the flattened tensor of ``key``, on the CPU; see Store."""
        return self._parts.read(key, start, stop)

    def write_part(self, key: str, start: int, value: torch.Tensor) -> None:
        """Write ``value`` over the elements of the flattened tensor of ``key`` from ``start`` on; see Store."""
        self._parts.write(key, start, value)

    def _put_resident(self, key: str, plain: torch.Tensor, spec: Spec) -> Entry | None:
        buffer = self._working_set.room.reserve(spec.nbytes)
        entry: Entry | None = None
        try:
            if not plain.is_cpu or spec.nbytes < _LARGE_NBYTES:
                copy_contiguous(buffer, plain, to_buffer=True)
                entry = self._install(key, spec, buffer)
            else:
                with self._condition:
                    generation, old = self._records.open_generation, self._records.entries.get(key)
                    is_new = old is None or not self._fits(old, spec)
                    key_id = self._records.new_key_ids(1) if old is None or is_new else old.key_id
                store_uuid = self._working_set.space.store_uuid
                digests = _copy_and_digest(buffer, plain, store_uuid, key_id, generation, spec.block_nbytes)
                known = (key_id, generation, digests)
                entry = self._install(key, spec, buffer, new_id=key_id if is_new else None, known=known)
        finally:
            if entry is None:
                self._working_set.unreserve(buffer)
        return entry

    def _install(
        self,
        key: str,
        spec: Spec,
        content: Buffer | bytes,
        *,
        new_id: int | None = None,
        known: _Digests | None = None,
    ) -> Entry | None:
        """Make ``content`` the bytes of ``key``: of its entry, where that fits, or of a new one, under ``new_id``.

        Returns None, with nothing done, where a commit without them was asked for meanwhile.
        """
        working_set = self._working_set
        with self._condition:
            entry = working_set.keys.settled(key, "put")
            if working_set.deferred_seal.is_closed:
                return None
            if entry is None or not self._fits(entry, spec):
                entry = working_set.keys.replace(entry, key, spec, scratch=not self._records.durable, key_id=new_id)
            else:
                working_set.residents.drop(entry)
            self._records.touch(entry)
            self._records.copied.pop(entry, None)  # none of its bytes stays
            if isinstance(content, bytes):
                entry.row = self._records.inline_row(entry, content)
                entry.state = EntryState.STORED
            else:
                working_set.room.take_over(content)
                working_set.residents.admit(entry, content)
                if known is not None and known[:2] == (entry.key_id, self._records.open_generation):
                    entry.digests = known[1:]
                entry.state = EntryState.DIRTY
                working_set.residents.offer(entry)
            return entry

    def _fits(self, entry: Entry, spec: Spec) -> bool:
        """Whether a put of ``spec`` goes on with ``entry``."""
        return entry.spec == spec and entry.scratch is not self._records.durable

    @uninterrupted
    def get(
        self, key: str, *, out: torch.Tensor | None = None, device: torch.device | str | int | None = None
    ) -> torch.Tensor:
        """Return a copy of the tensor of ``key``: a new one, on ``device``, or ``out``. KeyError."""
        refuse_modes("get", key)
        if out is not None and device is not None and torch.device(device) != out.device:
            raise ValueError(f"get({key!r}): out is on {out.device}, device={device!r}; give one of them")
        target = torch.device("cpu" if device is None else device) if out is None else out.device
        self._working_set.check(writing=False)
        with self._working_set.mark:
            while True:
                with contextlib.suppress(ReadPastError):  # the key has become another, or has left DRAM: look again
                    return self._get(key, out, target)

    def _get(self, key: str, out: torch.Tensor | None, target: torch.device) -> torch.Tensor:
        row = self._stored_row(key)
        if row is not None and row.inline is not None:
            result = result_for(Spec.of(row), key, out, target)
            if row.nbytes:
                flat_of(result).copy_(torch.frombuffer(bytearray(row.inline), dtype=torch.uint8))
            return result
        if row is not None:
            try:
                result = result_for(Spec.of(row), key, out, target)
            except BaseException:
                with self._condition:
                    self._working_set.space.end_stream(row)
                raise
            self._streams.get(row, flat_of(result))
            return result
        deadline = Deadline(f"lease of {key!r} for 'r'", self._working_set.deadline_s)
        alias, spec, _ = self._working_set.grants.obtain(key, "r", deadline, swaps_in=self._swaps_in)
        try:
            result = result_for(spec, key, out, target)
            copy_contiguous(alias.residence.buffer, result, to_buffer=False)
        finally:
            self._working_set.residents.report_end(alias)  # no tensor was made over its bytes
            self._working_set.released([alias])
        return result

    @uninterrupted
    def get_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors of ``keys``, swapping in ahead. KeyError before anything is read."""
        found: dict[str, Any] = dict.fromkeys(keys)  # in order; filled in below
        names = list(found)
        self._working_set.check(writing=False)
        for name in names[:1]:
            refuse_modes("get_many", name)
        with self._condition:
            for name in names:
                if name not in self._records:
                    raise KeyError(name)
        with self._working_set.mark:
            others = self._get_batches.get(names, found)
        for i, name in enumerate(others):
            if i % (_NUM_AHEAD // 2) == 0:
                self._working_set.prefetch(islice(others, i, i + _NUM_AHEAD))
            INTERRUPTS.look()
            found[name] = self.get(name)
        return found

    @uninterrupted
    def put_many(self, values: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put each of ``values``, in order; not atomic before the commit. Where one fails, all before it are put."""
        self._working_set.check(writing=True)
        items = values.items() if isinstance(values, Mapping) else values
        self._put_batches.put(PutSource(items, plain_value, self._spec))

    def _stored_row(self, key: str) -> Row | None:
        """Return the row to read past the working set: inline, or to be streamed and then with a stream begun."""
        with self._condition:
            self._working_set.residents.drain()
            self._working_set.room.raise_failure()
            entry = self._records.find(key)
            if entry is None:
                raise KeyError(key)
            row = entry.row
            if row is None or row.inline is not None:
                return row
            if entry.residence is not None or not self._streams.must_stream(row.nbytes):
                return None
            self._working_set.space.begin_stream(row)
            return row

    def _swaps_in(self, entry: Entry) -> bool:
        """Whether a get brings the bytes of ``entry``, which only the device has, into DRAM."""
        return entry.row is not None and entry.row.inline is None and not self._streams.must_stream(entry.nbytes)


def _copy_and_digest(
    buffer: Buffer, tensor: torch.Tensor, store_uuid: bytes, key_id: int, generation: int, block_nbytes: int
) -> bytes:
    """Copy ``tensor``, contiguous in DRAM, to the start of ``buffer``; return its digests.

    Each block is digested while a cache has it: to fetch it once more later takes a tenth of a put's CPU time.
    """
    digests, source = bytearray(), address_of(tensor)
    for start in range(0, tensor.nbytes, SLAB_NBYTES):
        end = min(start + SLAB_NBYTES, tensor.nbytes)
        # By this thread alone, as in host_tensor.py.
        ctypes.memmove(buffer.address + start, source + start, end - start)
        first = start // block_nbytes
        digests += block_digests(buffer.memory[start:end], store_uuid, key_id, block_nbytes, first, generation)
    return bytes(digests)


@uninterrupted
def adopt(working_set: WorkingSet, key: str, spec: Spec, ranges: Sequence[ExternalRange]) -> None:
    """Make ``key`` a tensor of ``spec`` whose bytes are those of ``ranges``, ascending, and zeros between; no I/O.

    An existing one is replaced. A write to it later, by a put or a lease, gives it bytes of the store's own. Raises
    UsageError for one without bytes there, or with more dimensions than a row holds.
    """
    working_set.check(writing=True)
    if not ranges or not spec.nbytes:
        raise UsageError(f"adoption of {key!r}: it has no bytes in an external file; put it instead")
    if len(spec.shape) > MAX_NUM_DIMS:  # order: before a commit has it, which would be lost
        raise UsageError(
            f"adoption of {key!r}: it has {len(spec.shape)} dimensions, of which a catalog row holds {MAX_NUM_DIMS}; "
            "put it instead, flattened"
        )
    while True:
        with working_set.mark:
            working_set.deferred_seal.settle()
        with working_set.mark, working_set.condition:
            old = working_set.keys.settled(key, "adoption")
            if working_set.deferred_seal.is_closed:  # a commit without it was asked for meanwhile
                continue
            entry = working_set.keys.replace(old, key, spec, scratch=not working_set.records.durable)
            adopted(working_set.records, entry, tuple(ranges))
            return
