"""SwappedActivations: saved tensors whose bytes are scratch keys of the store: in DRAM first, on NVMe when over budget.

A storage is saved whole, once for all tensors on it that autograd saves. It goes when the graph lets go of it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections import OrderedDict
from typing import Any, Generic, TypeVar

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from tiered.errors import CapacityError, UsageError
from tiered.store.residency.lease_view import is_read_only
from tiered.tiers.compute_tier import bytes_of
from tiered.units import KiB, format_bytes
from tiered.zero.parameters.module_calls import EngineParts
from tiered.zero.parameters.saved_references import check_unmodified

__all__ = ["SMALLEST_NBYTES", "FreedObjects", "SwappedActivations", "SwappedTensor"]


_T = TypeVar("_T")


class FreedObjects(Generic[_T]):
    """Facts about objects, handed out once their object has been freed. Thread-safe.

    An object may be freed between any two lines, in any thread and inside a garbage collection. No line of Python runs
    then (``weakref.finalize`` runs some, which a Ctrl-C may end), and no lock is taken: the interpreter itself puts the
    weak reference into a queue.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[weakref.ref[object]] = queue.SimpleQueue()
        # By id; a weak reference that is gone itself reports nothing.
        self._watches: dict[int, tuple[weakref.ref[object], _T]] = {}

    def __bool__(self) -> bool:
        """Whether an object that was watched has been freed since."""
        return not self._queue.empty()

    def watch(self, watched: object, facts: _T) -> None:
        """Have ``next_freed`` return ``facts`` once ``watched`` has been freed. They must not refer to it."""
        watch = weakref.ref(watched, self._queue.put)
        self._watches[id(watch)] = watch, facts

    def next_freed(self) -> _T | None:
        """Return the facts about the next object that was freed, None if there is none."""
        try:
            watch = self._queue.get_nowait()
        except queue.Empty:
            return None
        return self._watches.pop(id(watch))[1]


# -- swapped -----------------------------------------------------------------------------------------------------------


SMALLEST_NBYTES = 64 * KiB
"""A smaller storage stays in memory: moving it costs more than it takes."""

_MOST_TIMES_LARGER = 8  # a storage that is larger than this many of the saved tensor is another's: a data set
_ALIGNMENT = 64  # bytes; kernels give other bits off the alignment that a tensor had
_PREFIX = "model/activation/"

_log = logging.getLogger("tiered")


class SwappedStorage:
    """One storage's bytes in the store, alive as long as a tensor that autograd saved of it is."""

    __slots__ = ("__weakref__", "digest", "key", "nbytes", "serial", "shift", "source", "version")

    def __init__(self, name: tuple[str, int], storage: torch.UntypedStorage, version: int, digest: int) -> None:
        self.key, self.serial = name
        self.nbytes = storage.nbytes()
        self.shift = storage.data_ptr() % _ALIGNMENT  # where the bytes start in the key's tensor
        self.version = version
        self.digest = digest
        self.source: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # its identity, not its bytes


class SwappedTensor:
    """A saved tensor whose bytes are in the store: its part of a storage, and its looks."""

    __slots__ = ("dtype", "offset", "owner", "saved", "shape", "storage", "strides", "version")

    def __init__(self, owner: SwappedActivations, storage: SwappedStorage, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.storage = storage
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        self.saved = weakref.ref(tensor)  # a caller may modify it yet, which is an error as in memory

    def restore(self) -> torch.Tensor:
        """Return the tensor, in the arena's own bytes. Blocks on a swap in."""
        saved = self.saved()
        if saved is not None:
            check_unmodified(saved, self.version)
        flat = self.owner.bytes_of(self.storage)
        start = self.storage.shift
        typed = flat[start : start + self.storage.nbytes // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset)


class SwappedActivations:
    """The swapped activations of one model.

    The newest ``share_bytes`` are held in DRAM, for they are needed first; the working set may write and evict older
    ones. Invariant: a key exists until all references to it are dead and a later call has seen so; names are used
    again, in the order of a step, so that the trace knows them. Thread-safe.
    """

    def __init__(self, engine: EngineParts) -> None:
        self.share_bytes = 0
        self.num_swapped = 0  # storages so far
        self.num_left = 0  # that found no room in the budget and stayed in ordinary memory
        self._engine = engine
        self._lock = threading.RLock()
        self._num_in_step = 0
        self._serial = 0
        self._storages: dict[int, weakref.ref[SwappedStorage]] = {}  # by the address of torch's StorageImpl
        self._keys: dict[str, tuple[int, int]] = {}  # key -> serial number and bytes, of those in the store
        self._held: OrderedDict[str, int] = OrderedDict()  # oldest first
        self._freed: FreedObjects[tuple[str, int, int]] = (
            FreedObjects()
        )  # key, serial number and address of the storage
        self._unswept: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        engine.working_set.add_reclaimer(self._reclaim)

    def __repr__(self) -> str:
        return f"SwappedActivations({len(self._keys)} keys, {self.nbytes} B)"

    @property
    def nbytes(self) -> int:
        """The bytes of the keys that exist now, in DRAM or on NVMe."""
        return sum(nbytes for _, nbytes in self._keys.values())

    def begin_step(self) -> None:
        """A new step begins: the names start again."""
        self._num_in_step = 0
        self.sweep()

    def pack(self, tensor: torch.Tensor) -> SwappedTensor | None:
        """Put the bytes under ``tensor`` into the store and return a reference; None if they stay in memory.

        Blocks while room is made. Raises the store's errors, except CapacityError.
        """
        with self._engine.working_set.mark:
            if not _is_plain(tensor) or tensor.device != self._engine.tier.device:
                return None
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if nbytes < SMALLEST_NBYTES or nbytes > _MOST_TIMES_LARGER * tensor.numel() * tensor.element_size():
                return None
            if is_read_only(tensor) or storage.data_ptr() % tensor.element_size():
                return None
            self.sweep()
            version = tensor._version
            digest = 0  # torch counts the versions of all that a compute device saves
            if storage.device.type == "cpu":
                readable: Any = bytes_of(storage).numpy()
                digest = xxhash.xxh3_64_intdigest(readable)
            found = self._find(storage, version, digest)
            if found is None:
                found = self._put(tensor, version, digest)
            return None if found is None else SwappedTensor(self, found, tensor)

    def bytes_of(self, storage: SwappedStorage) -> torch.Tensor:
        """Return the bytes, (shift + nbytes,) uint8: the arena's own, or a copy where the budget has no room for them.

        Raises UsageError when they are gone: the store was rolled back.
        """
        with self._engine.working_set.mark:
            engine = self._engine
            engine.backward.seen()
            self.sweep()
            with self._lock:
                if not self._has(storage.key, storage.serial):
                    raise UsageError(
                        "backward through activations from before store.rollback() or resume(); expected a new forward"
                    )
            if engine.tier.was_changed(storage.key):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation,"
                    " while it was swapped out; clone() the tensor before it"
                )
            # Keys read ahead must find room beside the held ones: with half of the share some were read twice.
            engine.schedule.learn(storage.key, storage.nbytes, window_bytes=self.share_bytes // 4)
            engine.schedule.use(storage.key)
            try:
                return engine.tier.get(storage.key)
            except CapacityError:
                self._leave(storage.nbytes)
                copy: torch.Tensor = engine.store[storage.key]
                return copy.to(engine.tier.device)

    def sweep(self) -> None:
        """Delete the keys that nothing refers to any more, but for those whose write is in flight."""
        with self._engine.working_set.mark:
            while (ended := self._freed.next_freed()) is not None:
                self._unswept.put(ended)
            busy: list[tuple[str, int, int]] = []
            while not self._unswept.empty():
                try:
                    ended = self._unswept.get_nowait()
                except queue.Empty:  # another thread has it
                    break
                if not self._delete(*ended):
                    busy.append(ended)
            for item in busy:
                self._unswept.put(item)

    def reset(self) -> None:
        """Forget everything: the store was rolled back, or closes. References raise from now on."""
        with self._engine.working_set.mark:
            with self._lock:
                for key in self._keys:
                    with contextlib.suppress(KeyError):
                        self._engine.tier.delete(key)
                self._keys.clear()
                self._held.clear()
                self._storages.clear()
                self._num_in_step = 0

    def _find(self, storage: torch.UntypedStorage, version: int, digest: int) -> SwappedStorage | None:
        """Return the earlier object for the same storage and content, also where torch counts no version."""
        with self._lock:
            reference = self._storages.get(storage._cdata)
            found = None if reference is None else reference()
            if found is None or found.source.expired() or not self._has(found.key, found.serial):
                return None
            is_same = (found.version, found.digest, found.nbytes) == (version, digest, storage.nbytes())
            return found if is_same else None

    def _put(self, tensor: torch.Tensor, version: int, digest: int) -> SwappedStorage | None:
        working_set, storage = self._engine.working_set, tensor.untyped_storage()
        made = SwappedStorage(self._name(), storage, version, digest)
        nbytes = made.shift + made.nbytes
        working_set.create(made.key, nbytes, scratch=True)
        try:
            self._engine.tier.put(tensor, made.key, made.shift)
        except CapacityError:
            working_set.delete([made.key])
            self._leave(nbytes)
            return None
        with self._lock:
            self.num_swapped += 1
            self._keys[made.key] = made.serial, nbytes
            self._storages[storage._cdata] = weakref.ref(made)
            self._hold(made.key, nbytes)
        self._freed.watch(made, (made.key, made.serial, storage._cdata))
        return made

    def _name(self) -> tuple[str, int]:
        """Return a key that does not exist and a serial number that never did."""
        with self._lock:
            self._num_in_step += 1
            self._serial += 1
            key = f"{_PREFIX}{self._num_in_step}"
            return (f"{key}/{self._serial}" if key in self._keys else key), self._serial  # a graph outlived its step

    def _has(self, key: str, serial: int) -> bool:
        return self._keys.get(key, (-1, 0))[0] == serial

    def _hold(self, key: str, nbytes: int) -> None:
        """Keep the newest keys in DRAM: the oldest are needed last, and begin to be written."""
        working_set = self._engine.working_set
        if nbytes > self.share_bytes:
            return
        working_set.hold([key])
        self._held[key] = nbytes
        while sum(self._held.values()) > self.share_bytes:
            self._let_go_of_oldest()

    def _let_go_of_oldest(self) -> None:
        oldest, _ = self._held.popitem(last=False)
        with contextlib.suppress(KeyError):
            self._engine.working_set.release_hold([oldest])
            self._engine.working_set.swap_out([oldest])

    def _reclaim(self, nbytes: int) -> bool:
        """Give the working set a key back: the oldest held one begins to be written. See ``add_reclaimer``."""
        with self._engine.working_set.mark:
            with self._lock:
                if not self._held:
                    return False
                self._let_go_of_oldest()
                return True

    def _delete(self, key: str, serial: int, address: int) -> bool:
        """Delete ``key``; return False while a write of it is in flight, for no caller should wait for that."""
        with self._lock:
            if not self._has(key, serial):
                return True
            if self._engine.working_set.is_in_flight(key):
                return False
            del self._keys[key]
            self._held.pop(key, None)
            reference = self._storages.get(address)
            if reference is not None and reference() is None:
                del self._storages[address]
        with contextlib.suppress(KeyError):
            self._engine.tier.delete(key)
        return True

    def _leave(self, nbytes: int) -> None:
        """Say once that an activation is in ordinary memory because the budget has no room for it."""
        self.num_left += 1
        if self.num_left == 1:
            _log.warning(
                'activations="swap": no room for %s in the DRAM budget of %s: such activations stay in memory beyond'
                " it while they are used; give the store a larger dram=",
                format_bytes(nbytes),
                format_bytes(self._engine.working_set.budget_bytes),
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is nothing but bytes in memory and a shape."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and tensor.numel() > 0
    )
