"""Where threads of tiered hand over what they know of the device, as the simulated device is told of it.

The training thread and the update thread are parties of their own: what one of them has waited for is known to the
other only once it was handed over, by the lock of the update's queue or of the copies, by the start and the end of the
thread, or with the bytes of a lease. The store's own lock hands nothing over: all threads take it all the time.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from tiered.bytes.arena import Buffer
from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import BoundedThread
from tiered.bytes.device.base import Operation
from tiered.bytes.device.file_device import FileDevice
from tiered.store.residency.entry import Alias
from tiered.store.residency.residency import Residency
from tiered.store.transfers.checked_transfer import Transfer
from tiered.tiers.copies import Copies
from tiered.zero.optimizer import background_updates

__all__ = ["watch"]


class _Lock:
    """A lock whose holders know what those before them did."""

    def __init__(self, sim: ModuleType, lock: Any) -> None:
        self.sim, self.lock = sim, lock

    def acquire(self) -> None:
        self.lock.acquire()
        self.sim.take_over(id(self))

    def release(self) -> None:
        self.sim.hand_over(id(self))
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def watch(sim: ModuleType) -> Callable[[], None]:
    """Tell ``sim`` of the threads that begin from now on and of their hand-overs; return the call that ends it."""
    patches = _Patches()
    _watch_threads(sim, patches)
    _watch_locks(sim, patches)
    _watch_bytes(sim, patches)
    return patches.undo


class _Patches:
    """Attributes that have other values until ``undo``."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Have the attribute of ``owner`` be ``value``."""
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def around(
        self,
        cls: type,
        name: str,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> None:
        """Have ``before`` and ``after`` called with the positional arguments of each call of the method."""
        method = getattr(cls, name)

        @functools.wraps(method)
        def around(*args: Any, **options: Any) -> Any:
            if before is not None:
                before(*args)
            result = method(*args, **options)
            if after is not None:
                after(*args)
            return result

        self.set(cls, name, around)

    def undo(self) -> None:
        """Set all back."""
        while self.before:
            setattr(*self.before.pop())


def _watch_threads(sim: ModuleType, patches: _Patches) -> None:
    def begin(thread: threading.Thread) -> None:
        if thread.name == "tiered-update":
            sim.join()
            sim.take_over(id(thread))

    patches.around(BoundedThread, "start", before=lambda thread: sim.hand_over(id(thread)))
    patches.around(BoundedThread, "run", before=begin, after=lambda thread: sim.hand_over(id(thread)))
    patches.around(BoundedThread, "join", after=lambda thread, *_: sim.take_over(id(thread)))


def _watch_locks(sim: ModuleType, patches: _Patches) -> None:
    class Ordered(Condition):
        """The condition of the update's queue."""

        def __init__(self) -> None:
            super().__init__()
            enter, leave = self.__enter__, self.__exit__
            release, acquire = self._release_save, self._acquire_restore  # type: ignore[attr-defined]

            def entered() -> bool:
                enter()
                sim.take_over(id(self))
                return True

            def left(
                kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
            ) -> None:
                sim.hand_over(id(self))
                leave(kind, error, traceback)

            def released() -> Any:
                sim.hand_over(id(self))
                return release()

            def acquired(held: Any) -> None:
                acquire(held)
                sim.take_over(id(self))

            self.__enter__, self.__exit__ = entered, left  # type: ignore[method-assign,assignment]
            self._release_save, self._acquire_restore = released, acquired

    def guard(copies: Copies, *_: object) -> None:
        for name in ("_lock", "_sweeping"):
            setattr(copies, name, _Lock(sim, getattr(copies, name)))

    patches.set(background_updates, "Condition", Ordered)
    patches.around(Copies, "__init__", after=guard)


def _watch_bytes(sim: ModuleType, patches: _Patches) -> None:
    def hand_over(residency: Residency, aliases: Sequence[Alias]) -> None:
        for alias in aliases:
            sim.hand_over(alias.residence.buffer.address, alias.residence.buffer.nbytes)

    def take_over(working_set: Residency, key: str, mode: str, granted: Any) -> None:
        sim.take_over(granted[0].residence.buffer.address, granted[0].residence.buffer.nbytes)

    def reserve(residency: Residency, *arguments: Any, **options: Any) -> Buffer:
        buffer = reserve_unseen(residency, *arguments, **options)
        sim.take_over(buffer.address, buffer.nbytes)
        return buffer

    def unreserve(residency: Residency, buffer: Buffer) -> None:
        sim.hand_over(buffer.address, buffer.nbytes)

    def started(transfer: Transfer) -> None:
        sim.take_over(_address(transfer.memory), len(transfer.memory))  # the thread that starts may digest them

    def submitted(device: FileDevice, operations: Sequence[Operation]) -> None:
        for operation in operations:
            lo = _address(operation.memory)
            sim.take_over(lo // mmap.PAGESIZE * mmap.PAGESIZE, operation.nbytes)
            sim.use_pages(lo, lo + operation.nbytes, not operation.is_write)

    reserve_unseen = Residency.reserve
    patches.set(Residency, "reserve", reserve)
    patches.around(Residency, "unreserve", before=unreserve)
    patches.around(Residency, "end_leases", before=hand_over)
    patches.around(Residency, "_show", after=take_over)
    patches.around(Transfer, "start", before=started)
    patches.around(FileDevice, "submit", before=submitted)


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0
