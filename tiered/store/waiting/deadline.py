"""Bounded waiting on a condition: a warning at half time, DeadlineError at the end."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from tiered.errors import DeadlineError

__all__ = ["Deadline"]

_log = logging.getLogger("tiered")

_UNCHANGED = object()


class Awaited(Protocol):
    """A condition, or another way to wait with its lock held."""

    def wait(self, timeout: float, /) -> object: ...


class Deadline:
    """The patience of one operation. Time counts from the last sign of progress."""

    __slots__ = ("_begun_s", "_limit_s", "_operation", "_progress", "_start_s", "_warned")

    def __init__(self, operation: str, limit_s: float) -> None:
        """``operation`` names the wait for messages, with its key: ``"lease of 'a'"``."""
        self._operation = operation
        self._limit_s = limit_s
        self._begun_s = self._start_s = time.monotonic()
        self._progress: object = None
        self._warned = False

    @property
    def age_s(self) -> float:
        """The seconds since the operation began, with and without progress."""
        return time.monotonic() - self._begun_s

    def wait(self, condition: Awaited, progress: object = None, *, at_most_s: float = 60.0) -> None:
        """Wait until ``condition``, whose lock is held, is notified (or for a while); the caller then looks again.

        ``at_most_s`` is for events that do not notify. Raises DeadlineError.
        """
        condition.wait(min(at_most_s, self.patience_s(progress)))

    def patience_s(self, progress: object) -> float:
        """Return for how many seconds to wait until the next look. Raises DeadlineError.

        ``progress`` is any value that changes as long as the awaited event comes closer: then the time starts again.
        """
        now = self.check(progress)
        half_s = self._start_s + self._limit_s / 2
        return (half_s if now < half_s else self._start_s + self._limit_s) - now

    def renew(self) -> None:
        """Note a sign of progress: the time starts again."""
        self._start_s, self._warned = time.monotonic(), False

    def check(self, progress: object = _UNCHANGED) -> float:
        """Raise DeadlineError when the time is over, warn when half of it is; return the time."""
        now = time.monotonic()
        if progress is not _UNCHANGED and progress != self._progress:
            self._progress, self._start_s, self._warned = progress, now, False
        waited_s = now - self._start_s
        if waited_s >= self._limit_s:
            raise DeadlineError(
                f"{self._operation} did not happen within {self._limit_s:g} s; transfers in flight keep their buffers "
                "and extents until they complete: check the drive, or close the store"
            )
        if waited_s >= self._limit_s / 2 and not self._warned:
            self._warned = True
            _log.warning("%s takes long: %.1f s so far, an error after %g s", self._operation, waited_s, self._limit_s)
        return now
