"""A thread engine whose system calls a test can fail, shorten or hold up."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bytes.moving import WAIT_S
from tiered.bytes.device.threads import ThreadsDevice
from tiered.units import MiB

Call = Callable[[int, memoryview, int], int]


class FaultyDevice(ThreadsDevice):
    """Passes every system call through ``fault(call, fd, memory, offset)`` once ``fault`` is set."""

    fault: Callable[[Call, int, memoryview, int], int] | None = None
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
def faulty(directory: Path, *, num_threads: int = 2, deadline_s: float = WAIT_S) -> Iterator[FaultyDevice]:
    device = FaultyDevice(directory, num_threads=num_threads, deadline_s=deadline_s)
    try:
        device.grow(0, 1 * MiB)
        yield device
    finally:
        device.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered-io")]
