"""TensorMapping: the tensors of a store by name: whole, in part, many at a time, or their own bytes under a lease."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from tiered.bytes.interrupt import outside
from tiered.store.format.checksum import BLOCK_NBYTES, MIN_BLOCK_SHIFT
from tiered.store.format.row import ExternalRange, Spec
from tiered.store.format.safetensors_header import HeaderEntry
from tiered.store.lifetime.external import ExternalSources
from tiered.store.residency.lease_view import LeaseBlock, Mode
from tiered.store.residency.residency import Lease, Residency
from tiered.store.rows.rows import PartAccess
from tiered.store.values.batches import get_many, put_many
from tiered.store.values.tensors import check_block
from tiered.store.values.values import Values, adopt
from tiered.store.waiting.deferred_seal import Producers
from tiered.store.waiting.refusals import Refusals
from tiered.units import MiB, parse_bytes

__all__ = ["TensorMapping"]

_NUM_AHEAD = 16  # keys that a stream has on their way
_LEAST_TABLE_NBYTES = 256 * MiB


def _blocks_of(entry: HeaderEntry) -> int:
    """Return the bytes of a block of an adopted tensor that nobody gave."""
    if len(entry.shape) < 2 or entry.nbytes < _LEAST_TABLE_NBYTES:
        return BLOCK_NBYTES
    row_nbytes = entry.nbytes // entry.shape[0]
    return int(min(BLOCK_NBYTES, max(1 << MIN_BLOCK_SHIFT, 1 << row_nbytes.bit_length() - 1)))


class TensorMapping(MutableMapping[str, torch.Tensor]):
    """The mapping that a store is. All methods are thread-safe."""

    external: ExternalSources  # the user's own files that tensors may lie in
    working_set: Residency
    _refusals: Refusals
    _condition: threading.Condition
    _producers: Producers
    _access: PartAccess
    _values: Values

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a copy of the tensor of ``key``, the caller's own. KeyError."""
        if not isinstance(key, str):  # as in any mapping: no such key is there
            raise KeyError(f"expected a str as the key, got {type(key).__name__}")
        return self._values.get(self._producers.settled(key))

    def get(
        self,
        key: str,
        default: Any = None,
        *,
        out: torch.Tensor | None = None,
        device: torch.device | str | int | None = None,
    ) -> Any:
        """Return a copy of the tensor of ``key``, or ``default`` where there is none; blocks.

        The copy is a new tensor, on the CPU or on ``device``, or ``out``: contiguous, of the same dtype and shape, not
        requiring grad. A large one drives none out of DRAM. Raises ValueError, TypeError, LeaseError, CorruptionError.
        """
        try:
            return self._values.get(self._producers.settled(key), out=out, device=device)
        except KeyError:
            return default

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        """Make a copy of ``value`` the tensor of ``key``, in DRAM first; a commit makes it durable."""
        self._values.put(self._producers.settled(key), value)

    def put(self, key: str, value: torch.Tensor, *, block_size: int | str | None = None) -> None:
        """``store[key] = value``, with ``block_size`` bytes of it under one digest, such as "4KiB" for a table of rows.

        A part that is written costs whole blocks (``write_part``); more blocks cost more CPU time and catalog. A power
        of two from 4 KiB to 4 MiB; by default the one that the key has, if dtype and shape are the same, or 4 MiB.
        """
        block_nbytes = None if block_size is None else parse_bytes(block_size)
        self._values.put(self._producers.settled(key), value, block_nbytes)

    def read_part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return a copy of the elements [start, stop) of the flattened tensor of ``key``: (stop - start,), on the CPU.

        Only the blocks that they are in are read, and none becomes resident. Blocks. Raises KeyError, ValueError,
        LeaseError, CorruptionError.
        """
        return self._access.read_part(self._producers.settled(key), start, stop)

    def write_part(self, key: str, start: int, value: torch.Tensor) -> None:
        """Write ``value`` over as many elements of the flattened tensor of ``key``, from element ``start`` on; blocks.

        The blocks that they are in are written to the device, the first and the last after a read of the rest of them;
        a commit makes them durable, a rollback undoes them. Nothing else of the tensor moves, unless its bytes are in
        DRAM alone: then they are changed there, which an open lease of the key refuses; or in an external file: then
        all of it is copied to the store's own. Raises KeyError, ValueError, LeaseError, CapacityError, CorruptionError.
        """
        self._access.write_part(self._producers.settled(key), start, value)

    def adopt(
        self,
        key: str,
        file: str | os.PathLike[str],
        name: str,
        *,
        block_size: int | str = "auto",
        verify: str = "first commit",
    ) -> None:
        """Make ``key`` the tensor ``name`` of a safetensors ``file`` of ``external``, read in place; touches no bytes.

        Nothing of it is written to the store but the digests of its blocks. With ``verify="first commit"`` that commit
        reads what was not read by then. With ``"first touch"`` no commit reads any: a block has its digest, 8 bytes,
        from the first commit after its first read on (leaving the ``with`` block is one), and what others did to the
        file before goes unseen. ``verify()`` reads all of it, and names such keys; a commit after it keeps the digests.

        A later write to the key gives it bytes of its own. A part that is read costs whole blocks of ``block_size``
        as of ``put``, such as "4KiB" for a table of rows; "auto": those of a row, 4 KiB at least, of a tensor of at
        least two dimensions and 256 MiB, else 4 MiB. Raises UsageError, ValueError.
        """
        if verify not in ("first commit", "first touch"):
            raise ValueError(f"adoption of {key!r}: expected verify='first commit' or 'first touch', got {verify!r}")
        entry = self.external.find(file, name)
        block_nbytes = _blocks_of(entry) if block_size == "auto" else parse_bytes(block_size)
        check_block(f"adoption of {key!r}", block_nbytes, self.working_set.space.alignment)
        with self._condition:
            number = self.external.number(file)
        dtype = getattr(torch, entry.dtype)
        ranges = [ExternalRange(0, number, entry.offset, entry.nbytes)] if entry.nbytes else []
        spec, at_first_touch = Spec(dtype, entry.shape, block_nbytes), verify == "first touch"
        adopt(self.working_set, self._producers.settled(key), spec, ranges, at_first_touch=at_first_touch)

    def __delitem__(self, key: str) -> None:
        """Drop ``key``; a commit makes it durable. KeyError; LeaseError while it is leased for writing."""
        if key not in self:
            raise KeyError(key)
        self.working_set.delete([self._producers.settled(key)])

    def clear(self) -> None:
        """Drop all keys; a commit makes it durable."""
        self.working_set.delete([self._producers.settled(key) for key in self])

    def __contains__(self, key: object) -> bool:
        self._refusals.check()
        with self._condition:
            return isinstance(key, str) and self.working_set.is_shown(key)

    def __len__(self) -> int:
        self._refusals.check()
        with self._condition:
            return self.working_set.num_keys

    def __iter__(self) -> Iterator[str]:
        """Iterate over a snapshot of the names."""
        self._refusals.check()
        with self._condition:
            return iter(self.working_set.names())

    def get_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return copies of the tensors of ``keys``, in their order, read ahead. KeyError before anything is read.

        Raises TypeError for one str, whose letters would be keys.
        """
        return get_many(self._values, [self._producers.settled(key) for key in _several(keys)])

    def put_many(self, values: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put each of ``values``, a mapping or pairs, in order: where one fails, all before it are put, none after.

        As much as an eighth of the budget is left to be written when it is needed, or by the commit. Pairs are taken
        ahead of their puts: none may be computed from what an earlier pair of the same call puts.
        """
        pairs = values.items() if isinstance(values, Mapping) else values
        each = iter(functools.partial(outside, next, iter(pairs)), object())  # the caller's code, which may take long
        put_many(self._values, ((self._producers.settled(key), value) for key, value in each))

    def prefetch(self, keys: Iterable[str]) -> int:
        """Hint that ``keys`` are needed soon, in this order; never blocks on I/O. Returns bytes in DRAM or coming.

        Stops at the first key that does not fit beside the ones used now; keeps nothing for later. So ask for some of
        the budget's worth, and again as you go: ``for i, key in enumerate(keys): store.prefetch(keys[i : i + 16])``.
        """
        return self.working_set.prefetch(_several(keys))

    def evict(self, keys: Iterable[str]) -> int:
        """Drop ``keys`` from DRAM, dirty ones once they are written: the opposite of ``prefetch``. Blocks.

        Returns the bytes that are free by that. Keys that are leased, or kept alive by tensors of past leases, stay.
        Raises CapacityError, DeviceError.
        """
        return self.working_set.evict(self._producers.settled(key) for key in _several(keys))

    def stream(self, keys: Iterable[str], *, ahead: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over ``keys`` and views for reading of their tensors, in order, with the next ones on their way.

        Each view is a lease, which ends when the next one is asked for or the loop is left: ``clone()`` what must
        outlive its turn. ``ahead`` is how many keys are on their way at most (default: 16), as far as they fit. Raises
        as ``lease`` does; ValueError for a negative ``ahead``.
        """
        if ahead is not None and ahead < 0:
            raise ValueError(f"stream: expected ahead >= 0, got {ahead}")
        return self._stream(list(_several(keys)), _NUM_AHEAD if ahead is None else ahead)

    def _stream(self, keys: list[str], ahead: int) -> Iterator[tuple[str, torch.Tensor]]:
        for place, key in enumerate(keys):
            self.prefetch(keys[place : place + 1 + ahead])
            with self.lease(key) as view:
                yield key, view

    def lease(self, key: str, mode: Mode = "r") -> LeaseBlock:
        """Lease the arena's own bytes of ``key`` for a block: ``with store.lease("a", mode="rw") as view``.

        "r" views refuse writes, and so do all tensors on their bytes: by torch's RuntimeError, which the block's end
        turns into UsageError. Torch also refuses readers that ask for a pointer to write by (``numpy()``,
        ``data_ptr()``, ``torch.save``): give them a ``clone()``. "w" starts undefined; "rw" keeps the bytes written
        even if the block raises. While a lease for writing is open, commit, rollback, put, delete and other leases of
        the key raise LeaseError. So does the end of the block while tensors made from the view are alive. Entering
        raises KeyError, CapacityError.
        """
        if mode not in ("r", "w", "rw"):
            raise ValueError(f'lease of {key!r}: expected mode "r", "w" or "rw", got {mode!r}')
        return LeaseBlock(self._lease, self._producers.settled(key), mode)

    def _lease(self, key: str, mode: str) -> Lease:
        return self.working_set.lease(self._producers.settled(key), mode)

    async def aget(self, key: str) -> torch.Tensor:
        """``store[key]`` without blocking the event loop. A cancelled one goes on in its thread, to no effect."""
        return await asyncio.to_thread(self.__getitem__, key)

    async def aput(self, key: str, value: torch.Tensor) -> None:
        """``store[key] = value`` without blocking the event loop; ``value`` must not change meanwhile."""
        await asyncio.to_thread(self.__setitem__, key, value)


def _several(keys: Iterable[str]) -> Iterable[str]:
    if isinstance(keys, str):
        raise TypeError(f"expected an iterable of keys, got the one key {keys!r}: pass [{keys!r}]")
    return keys
