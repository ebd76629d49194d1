"""Moving bytes through a device and waiting for all of it: what every test of a device does."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiered.bytes.device.base import Device, IOClass, Operation

if TYPE_CHECKING:
    from tiered.bytes.arena import Buffer  # which imports torch: not in the processes that tests of devices start

_LIBC = ctypes.CDLL(None)  # order: a child that was forked beside threads must not load it
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

WAIT_S = 30.0  # longer than anything here takes; a lost completion fails a test instead of hanging it


class Batch:
    """Operations submitted to a device, and their completions."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.done: queue.SimpleQueue[Operation] = queue.SimpleQueue()

    def operation(
        self, verb: str, memory: memoryview, offset: int, *, file: int = 0, io_class: IOClass | None = None
    ) -> Operation:
        """Return an operation that reports here; ``verb`` is "read" or "write"."""
        is_write = verb == "write"
        default = IOClass.WRITE if is_write else IOClass.DEMAND
        return Operation(
            is_write=is_write,
            file=file,
            offset=offset,
            memory=memory,
            io_class=default if io_class is None else io_class,
            on_done=self.done.put,
        )

    def wait(self, num: int) -> list[Operation]:
        """Return the next ``num`` completed operations."""
        return [self.done.get(timeout=WAIT_S) for _ in range(num)]


def move(device: Device, verb: str, buffer: Buffer, offset: int = 0, *, file: int = 0) -> Exception | None:
    """Read or write all of ``buffer`` at ``offset``; return the operation's error."""
    batch = Batch(device)
    device.submit([batch.operation(verb, buffer.memory, offset, file=file)])
    return batch.wait(1)[0].error


def fill(buffer: Buffer, seed: int) -> bytes:
    """Fill ``buffer`` with bytes that differ from page to page and from seed to seed; return them."""
    pages = range(buffer.nbytes // 4096)
    content = b"".join(f"{seed}/{page}.".encode().ljust(64, b"#") * 64 for page in pages)
    buffer.memory[:] = content
    return content


def exit_code_of_child(check: Callable[[], None]) -> int:
    """Run ``check`` in a forked child; return 0 if it passes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking with threads: the point here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # or a worker that was ended for a hang leaves it
            check()
            code = 0
        except BaseException:
            traceback.print_exc()  # pytest shows it with the test that fails
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
