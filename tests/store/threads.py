"""The campaign of threads: lives of stores on which many threads call whatever they like, and what that must come to.

Some lives have drives that complete late and in any order, some that fail; some end with a close or an exception in the
middle of everything, some with a power cut. What is found wrong is a sentence.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tests.bytes.fresh_arena import FreshArena
from tests.devices.adaptor import Adaptor, relay
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.histories import History, Write, content
from tests.store.rig import WAIT_S, simulated_store
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Device, Operation
from tiered.errors import CapacityError, ClosedError, DeviceError, LeaseError, TieredError
from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__ = ["Life", "batch"]

_ENGINES = ("uring", "threads", "aiofiles", "mmap")
_ENDS = ("close", "leave", "close amid", "leave amid", "power cut")
_POLICIES = ("drop", "keep", "subset", "torn", "torn pages")
_DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e5m2)


class LateDevice(Adaptor):
    """Another device, whose operations begin late, in any order, and now and then fail."""

    def __init__(self, upstream: Device, seed: int, *, is_faulty: bool) -> None:
        super().__init__(upstream)
        self._rng = random.Random(seed)
        self._is_faulty = is_faulty
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[Operation] = []
        self._is_closed = False
        self._threads = [threading.Thread(target=self._serve) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def submit(self, operations: Sequence[Operation]) -> None:
        with self._changed:
            if self._is_closed:
                raise ClosedError(f"{self.name} is closed")
            self._waiting += operations
            self._changed.notify_all()

    def _serve(self) -> None:
        while (operation := self._next()) is not None:
            time.sleep(self._rng.choice((0, 0, 1e-4, 3e-4)))
            if self._is_faulty and self._rng.random() < 0.004:
                operation.error = DeviceError("the drive said no")
                operation.on_done(operation)
            else:
                self.upstream.submit([relay(operation, _Relayed(operation))])

    def _next(self) -> Operation | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            return self._waiting.pop(self._rng.randrange(len(self._waiting))) if self._waiting else None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.upstream.close()


class _Relayed:
    """The end of an operation that was handed on."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __call__(self, relayed: Operation) -> None:
        self._operation.error = relayed.error
        self._operation.on_done(self._operation)


class Life:
    """One store from its making to its end, and what it holds when it is opened again. All is drawn from the seed."""

    def __init__(self, seed: int, place: Path, *, num_actions: int = 100) -> None:
        """``place`` is a directory for the stores that are in files."""
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.place = place
        self.num_actions = num_actions
        self.engine = rng.choice(_ENGINES) if rng.random() < 0.25 else "simulated"
        self.num_devices = rng.choice((1, 1, 2, 3))
        self.num_threads = rng.choice((2, 3, 4, 8))
        self.num_keys = rng.randint(2, 8)  # of each thread
        self.end = rng.choice(_ENDS if self.engine == "simulated" else _ENDS[:-1])
        self.is_faulty = self.engine == "simulated" and rng.random() < 0.2
        self.history = History()
        self.commits: dict[int, list[int]] = {}  # number in its state -> called, returned, generation if it was awaited
        self.is_over = self.is_lost = False  # no call is served any more; a commit has failed
        self._disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=self.end == "power cut")
        self.budget_nbytes = rng.choice((64, 128, 1024)) * KiB if self.engine == "simulated" else 8 * MiB
        budget = self.budget_nbytes
        self.sizes = (
            0,
            1,
            100,
            1024,
            1025,
            4096,
            5000,
            budget // 16,
            budget // 5,
            budget // 4 + 1,
            min(2 * budget, 5 * MiB),
        )

    def __repr__(self) -> str:
        what = "faulty " if self.is_faulty else ""
        return (
            f"{what}{self.engine} on {self.num_devices}, {self.num_threads} threads, {self.budget_nbytes} B, {self.end}"
        )

    def run(self) -> list[str]:
        """Live it; return what was wrong."""
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(self.rng.choice((1e-6, 1e-5, 1e-3)))
        try:
            store = self._open()
            threads = [threading.Thread(target=_Caller(self, store, n).run) for n in range(self.num_threads)]
            for thread in threads:
                thread.start()
            if "amid" in self.end or self.end == "power cut":
                time.sleep(self.rng.random() * 0.002 * self.num_actions)
                begun, ended = self._finish(store)
            for thread in threads:
                thread.join(4 * WAIT_S)
                if thread.is_alive():
                    return [*self.history.wrong, f"{self}: a thread does not come back"]
            if not self.is_over:
                begun, ended = self._finish(store)
        finally:
            sys.setswitchinterval(interval_s)
        with contextlib.suppress(TieredError):
            store.close()  # idempotent
        self.history.check_reads()
        self._check_reopened(begun, ended)
        return self.history.wrong

    def _open(self, *, is_sound: bool = False) -> Store:
        if self.engine != "simulated":
            paths = [self.place / f"{self.seed}-{index}" for index in range(self.num_devices)]
            kind = Arena if self.seed % 2 == 0 else FreshArena
            return Store(*paths, engine=self.engine, _arena=kind(self.budget_nbytes))

        def late(device: Device) -> Device:
            return device if is_sound else LateDevice(device, self.seed, is_faulty=self.is_faulty)

        return simulated_store(
            self._disk, budget_nbytes=self.budget_nbytes, num_devices=self.num_devices, wrap=late
        )  # fmt: skip

    def _finish(self, store: Store) -> tuple[int, int]:
        """End the store's life; return from when to when that was."""
        begun = self.history.now()
        self.is_over = True
        if self.end == "power cut":
            self._disk = self._disk.power_cut(self.rng, self.rng.choice(_POLICIES))
            return begun, self.history.now()
        try:
            store._close(commit=self.end.startswith("close"))
        except TieredError as error:
            self.is_lost = True
            if not self.is_faulty and not isinstance(error, LeaseError):  # of a change that is being made
                self.history.wrong.append(f"close: {error!r}")
        return begun, self.history.now()

    def _check_reopened(self, begun: int, ended: int) -> None:
        with self._open(is_sound=True) as store:
            values = dict(store)
            what = f"generation {store.generation}"
            if self.end.startswith("close") and not self.is_lost:
                self.history.check_state(what, values, begun, ended)
            else:
                known = [generation for _, returned, generation in self.commits.values() if returned < begun]
                called, returned, _ = self.commits.get(store.state.get("number", 0), (0, 1, 0))
                if store.generation < max(known, default=0):
                    self.history.wrong.append(f"{what}, after {max(known)} was durable")
                self.history.check_state(what, values, called, min(returned, ended))
            if not store.verify().is_clean:
                self.history.wrong.append(f"{what} is damaged")


class _Caller:
    """One thread, which writes keys of its own and of all, reads everybody's, and some commit."""

    def __init__(self, life: Life, store: Store, number: int) -> None:
        self._life = life
        self._history = life.history
        self._store = store
        self._number = number
        self._rng = random.Random(life.seed * 100 + number)

    def run(self) -> None:
        calls = [self._put, self._put, self._put_many, self._change, self._delete, self._get, self._get, self._get]
        calls += [self._get_many, self._lease, self._look, self._verify]
        calls += [self._commit] * (self._number == 0 or self._rng.random() < 0.3)
        for _ in range(self._life.num_actions):
            try:
                self._rng.choice(calls)()
            except LeaseError:  # in another's way
                pass
            except (CapacityError, ClosedError, DeviceError) as error:
                if not self._goes_on(error):
                    return
            except Exception as error:
                self._history.wrong.append(f"thread {self._number}: {error!r}")
                return

    def _goes_on(self, error: TieredError) -> bool:
        """Whether a thread that met ``error`` can go on; notes one that it should not have met."""
        life, text = self._life, str(error)
        if isinstance(error, CapacityError) and "no room for" in text:  # a lease of more than the budget
            return True
        if not life.is_over and not life.is_faulty:
            self._history.wrong.append(f"thread {self._number}: {error!r}")
        life.is_lost |= "was not committed" in text
        return life.is_faulty and not life.is_over and not life.is_lost

    def _own_key(self) -> str:
        return f"{self._number}/{self._rng.randrange(self._life.num_keys)}"

    def _any_key(self) -> str:
        if self._rng.random() < 0.3:
            return "ab"[self._rng.randrange(2)]
        return f"{self._rng.randrange(self._life.num_threads)}/{self._rng.randrange(self._life.num_keys)}"

    def _new(self, key: str) -> tuple[Write, torch.Tensor]:
        """Return a write that begins, and the tensor to put: of any dtype, perhaps not contiguous."""
        nbytes = self._rng.choice(self._life.sizes)
        write = self._history.begin(key, nbytes if "/" in key else max(8, nbytes))
        value = content(key, write.version, write.nbytes or 0)
        dtype = self._rng.choice(_DTYPES)
        if value.numel() % (2 * dtype.itemsize) == 0 and value.numel():
            value = value.view(dtype).view(2, -1)
            value = value if self._rng.random() < 0.5 else value.mT.contiguous().mT
        return write, value

    def _put(self) -> None:
        key = self._own_key() if self._rng.random() < 0.7 else "ab"[self._rng.randrange(2)]
        write, value = self._new(key)
        self._store[key] = value
        self._history.end(write)

    def _put_many(self) -> None:
        writes: list[Write] = []

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for _ in range(self._rng.randint(1, 12)):
                key = self._own_key()
                write, value = self._new(key)
                writes.append(write)
                yield key, value

        self._store.put_many(pairs())
        for write in writes:
            self._history.end(write)

    def _change(self) -> None:
        key = self._own_key() if self._rng.random() < 0.7 else "ab"[self._rng.randrange(2)]
        write: Write | None = None
        with contextlib.suppress(KeyError, ZeroDivisionError), self._store.lease(key, mode="rw") as view:
            write = self._history.begin(key, view.nbytes)
            if view.nbytes:
                view.view(-1).view(torch.uint8).copy_(content(key, write.version, view.nbytes))
            if self._rng.random() < 0.3:
                raise ZeroDivisionError  # what was written stays
        if write is not None:
            self._history.end(write)

    def _delete(self) -> None:
        key = self._own_key()
        write = self._history.begin(key, None)
        with contextlib.suppress(KeyError):
            del self._store[key]
        self._history.end(write)

    def _read(self, key: str, read: Callable[[], torch.Tensor | None]) -> None:
        called = self._history.now()
        self._history.read(key, called, read())

    def _get(self) -> None:
        key = self._any_key()
        value = self._store.get(key)
        if value is not None and self._rng.random() < 0.3:
            with contextlib.suppress(ValueError):  # it looks otherwise by now
                self._read(key, lambda: self._store.get(key, out=torch.empty_like(value)))
        else:
            self._read(key, lambda: self._store.get(key))

    def _get_many(self) -> None:
        keys = {self._any_key() for _ in range(self._rng.randint(1, 20))}
        called = self._history.now()
        with contextlib.suppress(KeyError):
            for key, value in self._store.get_many(keys).items():
                self._history.read(key, called, value)

    def _lease(self) -> None:
        key = self._any_key()
        called = self._history.now()
        with contextlib.suppress(KeyError), self._store.lease(key, mode="r") as view:
            time.sleep(self._rng.choice((0, 1e-3)))
            self._history.read(key, called, view.clone())

    def _look(self) -> None:
        store = self._store
        keys = [self._any_key() for _ in range(6)]
        store.prefetch(keys[:4])
        store.working_set.swap_out(keys[3:])
        if len(store.records()) < 0 or store.statistics().working_set.peak_bytes > self._life.budget_nbytes:
            self._history.wrong.append("more DRAM than the budget")

    def _verify(self) -> None:
        if self._number == 1 and not self._store.verify().is_clean:
            self._history.wrong.append("verify found damage")

    def _commit(self) -> None:
        number = self._rng.getrandbits(40)
        noted = self._life.commits[number] = [self._history.now(), 1 << 62, 0]
        is_awaited = self._rng.random() < 0.5
        generation = self._store.commit({"number": number}, wait=is_awaited)
        noted[1:] = self._history.now(), generation if is_awaited else 0


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Live the life of ``seed``; return 1 and what was wrong. Leaves nothing in ``place``, which may be in memory."""
    with tempfile.TemporaryDirectory(dir=place) as own:
        life = Life(seed, Path(own))
        return 1, [f"{life}: {wrong}" for wrong in life.run()[:3]]
