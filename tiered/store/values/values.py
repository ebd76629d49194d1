"""Values: whole tensors in and out of the store, by copy; and keys whose bytes lie in the user's own files."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.host_tensor import address_of, copy_contiguous
from tiered.errors import UsageError
from tiered.store.format.checksum import MIN_BLOCK_SHIFT
from tiered.store.format.row import INLINE_NBYTES, MAX_NUM_DIMS, ExternalRange, Row, Spec, is_kept
from tiered.store.residency.entry import Entry, EntryState
from tiered.store.residency.residency import ReadPastError, Residency
from tiered.store.values.streaming import StreamedValues
from tiered.store.values.tensors import check_block, flat_of, plain_value, read_resident, result_for
from tiered.store.waiting.calling_thread import refuse_modes

__all__ = ["Values", "adopt"]


_SMALLEST_BLOCK_NBYTES = 1 << MIN_BLOCK_SHIFT


class Values:
    """put and get, each in two ways: resident, or streamed where the bytes are more than a quarter of the budget.

    A resident put copies the value into the arena, as the bytes of its key; a resident get copies them out under a
    lease. A streamed one moves blocks between the device and the caller's tensor through a bounded window of buffers,
    and drives nothing out of DRAM. A tensor of at most 1 KiB is resident in its row.
    """

    def __init__(self, working_set: Residency, streams: StreamedValues) -> None:
        self.working_set = working_set
        self._condition = working_set.condition
        self._streams = streams
        self._most_resident_nbytes = working_set.budget_bytes // 4

    def put(self, key: str, value: torch.Tensor, block_nbytes: int | None = None) -> None:
        """See ``TensorMapping.put``; the last put wins. Readers see the old tensor or the new one.

        Raises TypeError for anything but a plain strided tensor, LeaseError, CapacityError, DeviceError.
        """
        self.working_set.check(writing=True)
        plain = plain_value(key, value)
        with self.working_set.mark:
            while not self._put(key, plain, self.spec_of(key, plain, block_nbytes)):
                pass
            self.working_set.write_ahead()

    def _put(self, key: str, plain: torch.Tensor, spec: Spec) -> bool:
        """Put it; False where a commit without it was asked for meanwhile, and all is to be done again."""
        self.working_set.await_seal()
        if spec.nbytes > self._most_resident_nbytes:
            self._streams.put(key, flat_of(plain), spec, scratch=not self.working_set.durable)
            return True
        if spec.nbytes > INLINE_NBYTES:
            return self._put_resident(key, plain, spec)
        host = plain.cpu()
        return self._install(key, spec, ctypes.string_at(address_of(host), spec.nbytes) if spec.nbytes else b"")

    def put_zeros(self, key: str, spec: Spec) -> None:
        """Make ``key`` a tensor of ``spec`` that is all zeros, on the device alone unless it lives in its row.

        Raises TypeError for a dtype that no store keeps, ValueError for a shape that no tensor has.
        """
        if not is_kept(spec.dtype) or any(dim < 0 for dim in spec.shape) or len(spec.shape) > MAX_NUM_DIMS:
            raise ValueError(f"rows of {key!r}: no tensor is {spec.dtype} {list(spec.shape)}")
        if spec.nbytes <= INLINE_NBYTES:
            return self.put(key, torch.zeros(spec.shape, dtype=spec.dtype, device="cpu"))
        self.working_set.check(writing=True)
        with self.working_set.mark:
            self.working_set.await_seal()
            self._streams.put(key, None, spec, scratch=not self.working_set.durable)

    def spec_of(self, key: str, plain: torch.Tensor, block_nbytes: int | None = None) -> Spec:
        """Return the looks of ``plain`` as the tensor of ``key``."""
        if block_nbytes is not None:
            check_block(f"put of {key!r}", block_nbytes, self.working_set.space.alignment)
            return Spec.like(plain, block_nbytes)
        spec = Spec.like(plain)
        if spec.nbytes > _SMALLEST_BLOCK_NBYTES:
            with self._condition:
                old = self.working_set.entries.peek(key)
            if old is not None and (old.spec.dtype_name, old.spec.shape) == (spec.dtype_name, spec.shape):
                return Spec.like(plain, old.spec.block_nbytes)
        return spec

    def _put_resident(self, key: str, plain: torch.Tensor, spec: Spec) -> bool:
        buffer = self.working_set.reserve(spec.nbytes)
        is_installed = False
        try:
            copy_contiguous(buffer, plain, to_buffer=True)
            is_installed = self._install(key, spec, buffer)
        finally:
            if not is_installed:
                self.working_set.unreserve(buffer)
        return is_installed

    def _install(self, key: str, spec: Spec, content: Buffer | bytes) -> bool:
        """Make ``content`` the bytes of ``key``: of its entry, where that fits, or of a new one.

        Returns False, with nothing done, where a commit without the bytes was asked for meanwhile.
        """
        working_set = self.working_set
        with self._condition:
            entry = working_set.idle_entry(key, "put")
            if working_set.must_await_seal:
                return False
            if entry is None or not self._fits(entry, spec):
                entry = working_set.replace_entry(entry, key, spec, scratch=not working_set.durable)
            else:
                working_set.drop(entry)
            working_set.touch(entry)
            working_set.copied.pop(entry, None)  # none of its bytes stays
            if isinstance(content, bytes):
                entry.row = working_set.inline_row(entry, content)
                entry.state = EntryState.STORED
            else:
                working_set.end_reservation(content)
                working_set.admit(entry, content)
                entry.state = EntryState.DIRTY
                working_set.offer(entry)
            return True

    def _fits(self, entry: Entry, spec: Spec) -> bool:
        """Whether a put of ``spec`` goes on with ``entry``."""
        return entry.spec == spec and entry.scratch is not self.working_set.durable

    def get(
        self, key: str, *, out: torch.Tensor | None = None, device: torch.device | str | int | None = None
    ) -> torch.Tensor:
        """Return a copy of the tensor of ``key``: a new one, on ``device``, or ``out``. KeyError."""
        refuse_modes("get", key)
        if out is not None and device is not None and torch.device(device) != out.device:
            raise ValueError(f"get({key!r}): out is on {out.device}, device={device!r}; give one of them")
        target = torch.device("cpu" if device is None else device) if out is None else out.device
        make = functools.partial(result_for, key=key, out=out, device=target)

        def copy(spec: Spec, buffer: Buffer) -> torch.Tensor:
            result = make(spec)
            copy_contiguous(buffer, result, to_buffer=False)
            return result

        self.working_set.check(writing=False)
        with self.working_set.mark:
            while True:
                row = self._row_past(key)
                if row is not None:
                    return self._get_past(row, make)
                with contextlib.suppress(ReadPastError):  # the key has become another, or has left DRAM: look again
                    return read_resident(self.working_set, key, copy, self._most_resident_nbytes)

    def _row_past(self, key: str) -> Row | None:
        """Return the row to read past the arena: inline, or to be streamed and then with a stream begun. KeyError."""
        with self._condition:
            entry = self.working_set.shown(key)
            if entry is None:
                raise KeyError(key)
            if INLINE_NBYTES < entry.nbytes <= self._most_resident_nbytes:
                return None
            self.working_set.catch_up()
            row = entry.row
            if row is None or row.inline is not None:
                return row
            if entry.is_inline or entry.residence is not None:
                return None
            self.working_set.space.begin_stream(row)
            return row

    def _get_past(self, row: Row, make: Callable[[Spec], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of ``row``, as of ``_row_past``, in the tensor that ``make`` returns."""
        if row.inline is not None:
            result = make(Spec.of(row))
            if row.nbytes:
                flat_of(result).copy_(torch.frombuffer(bytearray(row.inline), dtype=torch.uint8))
            return result
        try:
            result = make(Spec.of(row))
        except BaseException:
            with self._condition:
                self.working_set.space.end_stream(row)
            raise
        self._streams.get(row, flat_of(result))
        return result


def adopt(
    working_set: Residency, key: str, spec: Spec, ranges: Sequence[ExternalRange], *, at_first_touch: bool = False
) -> None:
    """Make ``key`` a tensor of ``spec`` whose bytes are those of ``ranges``, ascending, and zeros between; no I/O.

    An existing one is replaced. Digests come ``at_first_touch``, or with the first commit: see ``TensorMapping.adopt``.
    Raises UsageError for one without bytes there, or with more dimensions than a row holds.
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
            working_set.await_seal()
        with working_set.mark, working_set.condition:
            old = working_set.idle_entry(key, "adoption")
            if working_set.must_await_seal:  # a commit without it was asked for meanwhile
                continue
            entry = working_set.replace_entry(old, key, spec, scratch=not working_set.durable)
            working_set.adopt_ranges(entry, tuple(ranges), at_first_touch=at_first_touch)
            return
