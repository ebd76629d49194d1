"""Dropping: the ends of what nobody has any more, each in a thread of its own.

A finalizer finds out that nobody has it, which may run anywhere, under any lock: it must not wait, and a thread may.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable

from tiered.bytes.endings import at_exit
from tiered.bytes.inside import HERE

__all__ = ["drop", "finish_dropping", "start_keeper"]

_PATIENCE_S = 10.0  # for keepers; who waits is about to be told that what he wants is taken

_endings: set[_Ending] = set()  # those that are over go with the next one, or when somebody waits for all
_keepers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
os.register_at_fork(after_in_child=_endings.clear)  # what the parent drops is not the child's


class _Ending:
    """Something that is to be done once, by whoever comes to it first. Made without waiting for anybody."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.is_over = False
        self._end = end
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self.run, name="tiered-drop", daemon=False)
        self._has_begun = threading.Event()

    def begin(self) -> None:
        """Have a thread do it; does not wait, as threading does for a thread that it starts: one of C's starts it."""
        try:
            _thread.start_new_thread(self._start, ())
        except RuntimeError:  # no more threads for this process, or it is ending: whoever needs its end sees to it
            self._has_begun.set()

    def _start(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._thread.start()
        self._has_begun.set()

    def run(self) -> None:
        """Do it, or wait for who does."""
        with HERE.inside, self._turn:
            if not self.is_over:
                self.is_over = True
                self._end()

    def join(self) -> None:
        """Do it, or wait for who does, and for the thread."""
        self.run()
        self._has_begun.wait()
        if self._thread.ident is not None:
            self._thread.join()


def start_keeper(thread: threading.Thread) -> None:
    """Start a thread that does what is left to do, as a commit, and has hold of the whole store meanwhile."""
    thread.start()
    _keepers.add(thread)


def drop(end: Callable[[], None]) -> None:
    """Have ``end()`` called soon; does not wait. For finalizers: any thread, any lock held, inside a collection."""
    for ending in list(_endings):
        if ending.is_over:
            _endings.discard(ending)
    ending = _Ending(end)
    _endings.add(ending)
    at_exit(ending, _Ending.run)
    ending.begin()


def finish_dropping() -> None:
    """Collect garbage, and wait until all that was dropped has come to its end; blocks. Not under a lock."""
    for keeper in list(_keepers):
        keeper.join(_PATIENCE_S)
    gc.collect()  # a model and its store refer to each other
    while _endings:
        _endings.pop().join()
