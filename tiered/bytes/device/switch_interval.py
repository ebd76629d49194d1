"""How long a busy Python thread may keep the interpreter's lock from the thread that serves a drive.

CPython's default interval is 5 ms. A drive moves 16 MiB in that time and would then idle. Beside a busy thread, 8
blocks of 4 MiB in flight move at 0.75 of the idle rate with an interval of 5 ms, and at 0.95 with one of 1 ms. Two
threads of pure Python that compete for the lock lose 6 % (bench/LOG.md).
"""

from __future__ import annotations

import sys
import threading

from tiered.bytes.exit_and_fork import after_fork

__all__ = ["ShortSwitchInterval"]

_DEFAULT_S = 0.005  # of CPython
_SHORT_S = 0.001


class ShortSwitchInterval:
    """Makes ``sys.setswitchinterval`` 1 ms in the whole process, from its construction to its ``end``. Thread-safe.

    The first instance shortens the default, and the last one restores it. An interval that the program has set
    itself, before or since, is kept.
    """

    __slots__ = ("_is_over",)

    def __init__(self) -> None:
        self._is_over = False
        _interval.begin()

    def end(self) -> None:
        """Restore the interval, unless other instances need it short. Idempotent."""
        if not self._is_over:
            self._is_over = True
            _interval.end()


class _Interval:
    """The process's interval and how many need it short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ours = False  # we have set it
        after_fork(self, _Interval._end_in_child)

    def begin(self) -> None:
        with self._lock:
            self._num_users += 1
            if not self._is_ours and sys.getswitchinterval() == _DEFAULT_S:
                sys.setswitchinterval(_SHORT_S)
                self._is_ours = True

    def end(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._restore()

    def _restore(self) -> None:
        if self._is_ours and sys.getswitchinterval() == _SHORT_S:
            sys.setswitchinterval(_DEFAULT_S)
        self._is_ours = False

    def _end_in_child(self) -> None:
        """Start anew: a child serves no drive, and another thread of its parent may have held the lock."""
        self._lock = threading.Lock()
        self._num_users = 0
        self._restore()


_interval = _Interval()
