"""Blocking calls on several devices at the same time: flushes, which take long and wait for hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered.bytes.critical_section import ServiceThread
from tiered.errors import CapacityError

__all__ = ["in_parallel"]


def in_parallel(calls: Sequence[Callable[[], None]]) -> list[Exception]:
    """Make all ``calls`` at the same time, the last one here; return the errors, in the order of the calls.

    Blocks until all have returned; no thread is left. Where no thread can be started (limits, the end of the
    interpreter) a call is made here.
    """
    errors: list[Exception | None] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            calls[index]()
        except Exception as error:
            errors[index] = error

    started: list[ServiceThread] = []
    try:
        for index in range(len(calls) - 1):
            thread = ServiceThread(target=make, args=(index,), name=f"tiered-flush-{index}")
            try:
                thread.start()
            except CapacityError:
                make(index)
            else:
                started.append(thread)
        if calls:
            make(len(calls) - 1)
    finally:
        for thread in started:
            thread.join()
    return [error for error in errors if error is not None]
