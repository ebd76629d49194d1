"""Forks that wait: a child never inherits a held lock, or data that was half changed under it."""

from __future__ import annotations

import itertools
import os
import threading
import weakref

__all__ = ["make_forks_wait"]

_locks: dict[weakref.ref[object], threading.Lock] = {}  # an ordinary one: it is copied in one step
_fork_lock = threading.Lock()
_held: list[threading.Lock] = []  # across one fork; _fork_lock guards it
_num_owners = itertools.count()


def make_forks_wait(owner: object, lock: threading.Lock) -> None:
    """Have every fork of this process wait for ``lock``, as long as ``owner`` lives."""
    if next(_num_owners) == 0:  # atomic: hooks that were there twice would wait for their own lock at every fork
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
    _locks[weakref.ref(owner, _forget)] = lock


def _forget(owner: weakref.ref[object]) -> None:
    _locks.pop(owner, None)


def _before_fork() -> None:
    _fork_lock.acquire()
    for lock in list(_locks.values()):
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _fork_lock.release()
