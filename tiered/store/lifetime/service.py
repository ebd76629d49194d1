"""Service: whether the calls of a store are served, and the errors they raise when they are not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from tiered.errors import ClosedError, UsageError

__all__ = ["Service", "too_late", "warn_of_nested_close"]


class Service:
    """Asked by every call, also under the store's lock. Refers to no store: the parts that ask must not keep it."""

    __slots__ = ("is_closed", "is_late", "pid", "refuse_failed")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_closed = False  # no call is served any more
        self.is_late = False  # the process ended first: the devices are closed, and nothing can be committed any more
        self.refuse_failed: Callable[[], None] = lambda: None  # raises after a commit that failed

    def refuse(self) -> None:
        """Raise when no call can be served: ClosedError, UsageError in a fork, the error of a failed commit."""
        if self.pid != os.getpid():
            raise UsageError(
                f"the store belongs to process {self.pid} and cannot be used in its fork {os.getpid()}; pass worker "
                "processes plain tensors, or open a store of their own there"
            )
        if self.is_closed:
            raise too_late() if self.is_late else ClosedError("the store is closed")
        self.refuse_failed()


def too_late() -> ClosedError:
    """Return the error of a call that comes when the process is ending."""
    return ClosedError(
        "the process is ending, and the threads that move a store's bytes have ended before any atexit function; close "
        "the store before: with tiered.Store(...) as store, or try and finally around the program, where threads that "
        "use it are joined"
    )


def warn_of_nested_close(name: str) -> None:
    """Warn that a call of close() has closed nothing: it came in the middle of another call, in the same thread."""
    warnings.warn(
        f"close() of {name} came from a finalizer or a signal handler that interrupted a call of it in this thread:"
        " nothing was closed; close it where the program is done with it",
        ResourceWarning,
        stacklevel=5,
    )
