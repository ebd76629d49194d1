"""Adaptor: a device over another device, which a test or a bench changes in one respect."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered.bytes.device.base import Device, DeviceStatistics, Operation
from tiered.bytes.exit_and_fork import this_process

__all__ = ["Adaptor", "relay"]


class Adaptor(Device):
    """Hands everything on to ``upstream``, which it owns: closing the adaptor closes it.

    Subclasses override ``submit`` and other methods that they change. Like every device it is refused in a forked
    child, before any lock is taken that some thread of the parent may have held.
    """

    def __init__(self, upstream: Device) -> None:
        self.upstream = upstream
        self.name = upstream.name
        self.alignment = upstream.alignment
        self._process = this_process()

    def files(self) -> dict[int, int]:
        """Return the number and size of each file."""
        return self.upstream.files()

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks."""
        self.upstream.grow(file, nbytes)

    def punch(self, file: int, start: int, end: int) -> bool:
        """Give the space of [start, end) of ``file`` back; blocks."""
        return self.upstream.punch(file, start, end)

    def fill(self, file: int, start: int, end: int) -> None:
        """Allocate [start, end) of ``file`` again; blocks."""
        self.upstream.fill(file, start, end)

    def holes(self, file: int) -> list[tuple[int, int]]:
        """Return the ranges of ``file`` without space; blocks."""
        return self.upstream.holes(file)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``; does not block on them."""
        self.upstream.submit(operations)

    def flush(self) -> None:
        """Make completed writes, growth and new files durable; blocks."""
        self.upstream.flush()

    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate."""
        return self.upstream.free_bytes()

    def path(self, file: int) -> str:
        """Return the name of ``file`` for messages."""
        return self.upstream.path(file)

    def statistics(self) -> DeviceStatistics:
        """Return the upstream's counters."""
        return self.upstream.statistics()

    def close(self) -> None:
        """Wait for operations in flight, then close the upstream. Idempotent."""
        self.upstream.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.upstream!r})"


def relay(
    operation: Operation,
    on_done: Callable[[Operation], None],
    *,
    file: int | None = None,
    offset: int | None = None,
    memory: memoryview | None = None,
) -> Operation:
    """Return an operation for an upstream in the place of ``operation``, equal but for the arguments given.

    The caller completes ``operation`` itself, once, in ``on_done`` or after it.
    """
    return Operation(
        is_write=operation.is_write,
        file=operation.file if file is None else file,
        offset=operation.offset if offset is None else offset,
        memory=operation.memory if memory is None else memory,
        io_class=operation.io_class,
        on_done=on_done,
    )
