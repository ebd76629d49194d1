"""How long a busy Python thread keeps the interpreter's lock from the thread that serves a drive.

CPython's default is 5 ms: as long as a drive takes for 16 MiB, so it would idle for a part of every turn. Beside a busy
thread, 8 blocks of 4 MiB in flight move at 0.75 of the idle rate with turns of 5 ms and at 0.95 with turns of 1 ms;
two threads of pure Python that compete for the lock lose 6 % of theirs (bench/LOG.md).
"""

from __future__ import annotations

import sys
import threading

from tiered.bytes.exit_and_fork import after_fork

__all__ = ["ShortTurns"]

_DEFAULT_S = 0.005  # of CPython
_SHORT_S = 0.001


class ShortTurns:
    """From its making to its ``end``, turns last 1 ms at most (``sys.setswitchinterval``), in the whole process.

    Only the default is shortened, by the first that begins, and put back by the last that ends: who has set another
    interval, before or since, keeps it. Thread-safe.
    """

    __slots__ = ("_is_over",)

    def __init__(self) -> None:
        self._is_over = False
        _interval.begin()

    def end(self) -> None:
        """Let turns be as before, unless others need them short. Idempotent."""
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
        """A child serves no drive, and some thread of its parent may have held the lock."""
        self._lock = threading.Lock()
        self._num_users = 0
        self._restore()


_interval = _Interval()
