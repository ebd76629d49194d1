"""The critical section: code in which other threads wait for the calling thread, so it must not wait for a store.

A signal handler or a finalizer may interrupt such code. A call of a store from there would wait for its own thread.
All threads of tiered's own are made here; those that other threads wait for live in the critical section.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from tiered.errors import CapacityError

__all__ = ["CRITICAL_SECTION", "BoundedThread", "ServiceThread"]

_START_DEADLINE_S = 10.0  # a thread that begins later than this finds no job and ends


class _CriticalSection(threading.local):
    """``with CRITICAL_SECTION.lock:`` marks a block that takes locks. Each thread has its own, so it never blocks.

    It is a lock and not a counter, because no interrupt comes between the entry of a lock and its block.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_inside = self.lock._is_owned  # type: ignore[attr-defined]


CRITICAL_SECTION = _CriticalSection()


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        """Return at once: Thread.start would wait for ever for a thread that died of MemoryError before it reported."""
        return self.is_set()


class BoundedThread(threading.Thread):
    """A thread of tiered's own: its start ends within a deadline. The interpreter waits for the thread's end.

    Its current device is ``device``, the index of an accelerator; None: that of the thread that makes it. On device 0,
    where threads begin, another device's event that ends, also by the garbage collector, sets up a context of 300 MB.
    """

    def __init__(
        self,
        *,
        target: Callable[..., object],
        name: str | None = None,
        args: tuple[Any, ...] = (),
        device: int | None = None,
    ) -> None:
        super().__init__(name=name)
        self._device = _current_device() if device is None else device
        self._started = _Started()
        self._jobs = [(target, args)]  # the thread takes the job, or a start that failed: never both
        self._has_begun = threading.Lock()  # held until the thread has taken the job
        self._has_begun.acquire()

    def start(self) -> None:
        """Start the thread and wait until it has its job. Raises CapacityError: the job will then never run."""
        cause: Exception | None = None
        try:
            super().start()
            if self._has_begun.acquire(timeout=_START_DEADLINE_S):
                return
        except (RuntimeError, MemoryError) as error:  # no more threads for this process, or the interpreter is ending
            cause = error
        try:
            self._jobs.pop()
        except IndexError:  # the thread was only late
            return
        raise CapacityError(
            f"cannot start thread {self.name}: {cause or f'it did not begin within {_START_DEADLINE_S:g} s'}; free "
            "memory, or raise the limit on processes (ulimit -u, or the pids limit of the control group), or end some"
        ) from cause

    def run(self) -> None:
        """Run the job, unless the start was given up."""
        for _ in range(len(self._jobs)):
            target, args = self._jobs.pop()
            self._has_begun.release()
            if self._device:
                with contextlib.suppress(RuntimeError):  # of a broken device: whoever computes there meets it
                    torch.accelerator.set_device_index(self._device)
            target(*args)


class ServiceThread(BoundedThread):
    """A thread of tiered's own that other threads wait for: all of its life is a critical section."""

    def run(self) -> None:
        """Run the thread's target in the critical section."""
        with CRITICAL_SECTION.lock:
            super().run()


def _current_device() -> int:
    """Return the index of the calling thread's accelerator; 0 where this process has called none yet."""
    accelerator = torch.accelerator.current_accelerator()
    with contextlib.suppress(RuntimeError):  # of a broken device
        if accelerator and getattr(torch.get_device_module(accelerator.type), "is_initialized", bool)():
            return torch.accelerator.current_device_index()
    return 0
