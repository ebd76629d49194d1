"""Every engine over files, with system calls that a test can fail, shorten or hold up."""

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.bytes.moving import WAIT_S
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.ring import READ, WRITE, Ring
from tiered.bytes.device.threads import AiofilesDevice, MmapDevice, ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.units import KiB, MiB

Call = Callable[[int, memoryview, int], int]
Fault = Callable[[Call, int, memoryview, int], int]


class Faulty(FileDevice):
    """Passes every transfer through ``fault(call, fd, memory, offset)`` once ``fault`` is set."""

    fault: Fault | None = None
    sync_error: OSError | None = None
    num_syncs = 0

    def _pread(self, fd: int, memory: memoryview, offset: int) -> int:
        call = super()._pread
        return call(fd, memory, offset) if self.fault is None else self.fault(call, fd, memory, offset)

    def _pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        call = super()._pwrite
        return call(fd, memory, offset) if self.fault is None else self.fault(call, fd, memory, offset)

    def _fdatasync(self, fd: int) -> None:
        self.num_syncs += 1
        error, self.sync_error = self.sync_error, None
        if error is not None:
            raise error
        super()._fdatasync(fd)


class FaultyThreads(Faulty, ThreadsDevice):
    pass


class FaultyUring(Faulty, UringDevice):
    """What has a fault goes past the kernel's ring, to a thread of its own, and comes back as a completion."""

    def _new_ring(self, num_entries: int) -> Ring:
        return FaultyRing(num_entries, self)


class FaultyCutting(FaultyUring):
    """What is larger than two pages is two requests at least, two of which are with the kernel at a time."""

    def __init__(self, directory: Path, *, deadline_s: float = 60.0, direct: bool | None = None) -> None:
        super().__init__(directory, deadline_s=deadline_s, direct=direct)
        self.cut(8 * KiB, 2)


class FaultyRing(Ring):
    def __init__(self, num_entries: int, device: FaultyUring) -> None:
        super().__init__(num_entries)
        self._device = device
        self._is_real = True
        self._fds: dict[int, int] = {}
        self._faked: queue.SimpleQueue[tuple[threading.Thread, tuple[int, int, int]]] = queue.SimpleQueue()

    def set_file(self, slot: int, fd: int) -> None:
        self._fds[slot] = fd
        super().set_file(slot, fd)

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int) -> None:
        self._is_real = self._device.fault is None or self._fds[file] == self._device._wake_up.fd
        if self._is_real:
            super().prepare(opcode, file, address, nbytes, offset, tag)
            return
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
        call = self._device._pwrite if opcode == WRITE else self._device._pread

        def carry_out() -> None:
            try:
                result = call(self._fds[file], memory, offset)
            except OSError as error:
                result = -(error.errno or 0)
            self._faked.put((threading.current_thread(), (tag, result, 0)))
            os.eventfd_write(self._device._wake_up.fd, 1)

        threading.Thread(target=carry_out, name="fault", daemon=True).start()  # no process waits for a hung one

    def prepare_reads(self, *columns: NDArray[np.int64]) -> None:
        for each in zip(*(column.tolist() for column in columns), strict=True):
            self.prepare(READ, *each)

    def link(self) -> None:
        if self._is_real:
            super().link()

    def completions(self) -> list[tuple[int, int, int]]:
        found = super().completions()
        while not self._faked.empty():
            thread, completion = self._faked.get()
            thread.join()  # order: it must not wake a device that is closed by then, nor be taken for a leak
            found.append(completion)
        return found


class FaultyAiofiles(Faulty, AiofilesDevice):
    pass


class FaultyMmap(Faulty, MmapDevice):
    pass


ENGINES: dict[str, Callable[..., Faulty]] = {
    "threads": FaultyThreads,
    "uring": FaultyUring,
    "uring-cut": FaultyCutting,
    "aiofiles": FaultyAiofiles,
    "mmap": FaultyMmap,
}


class Errors:
    """A fault: the next calls raise these errors, in order; then all is well."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)
        self.num_calls = 0

    def __call__(self, call: Call, fd: int, memory: memoryview, offset: int) -> int:
        self.num_calls += 1
        if self.numbers:
            number = self.numbers.pop(0)
            raise OSError(number, os.strerror(number))
        return call(fd, memory, offset)


class Gate:
    """A fault: calls note their offset and wait until the gate opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Semaphore(0)
        self.offsets: list[int] = []

    def __call__(self, call: Call, fd: int, memory: memoryview, offset: int) -> int:
        self.offsets.append(offset)
        self.reached.release()
        assert self.opened.wait(WAIT_S)
        return call(fd, memory, offset)


@contextmanager
def faulty(directory: Path, engine: str = "threads", *, deadline_s: float = WAIT_S, **options: int) -> Iterator[Faulty]:
    if not engine.startswith("uring"):
        options.setdefault("num_threads", 2)
    device = ENGINES[engine](directory, deadline_s=deadline_s, **options)
    try:
        device.grow(0, 1 * MiB)
        yield device
    finally:
        device.deadline_s = WAIT_S  # whatever it was: a busy machine takes longer than that to end a thread
        device.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered-io")]
