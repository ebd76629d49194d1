"""Forked children own none of the parent's leases, so every engine in a child forgets its open units.

Before the fork the parent finishes its updates: a child must not find a lock that a thread of the parent's holds.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["forget_in_children"]


class _Forgetful(Protocol):
    def forget(self) -> None: ...

    def settle(self) -> None: ...


_forgetful: weakref.WeakSet[_Forgetful] = weakref.WeakSet()
_is_watching = False


def forget_in_children(engine: _Forgetful) -> None:
    """Have ``engine.settle()`` called before each fork and ``engine.forget()`` in each child, as long as it lives."""
    global _is_watching
    _forgetful.add(engine)
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(before=_settle_all, after_in_child=_forget_all)


def _settle_all() -> None:
    for engine in list(_forgetful):
        engine.settle()


def _forget_all() -> None:
    for engine in list(_forgetful):
        engine.forget()
