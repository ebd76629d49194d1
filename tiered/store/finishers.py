"""Finishers: who works with keys behind calls that have returned, and finishes before a caller uses one of them."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Finishers"]


class Finishers:
    """The finishers of one store, asked in the order in which they were added."""

    def __init__(self) -> None:
        self._finishers: list[Callable[[str], None]] = []

    def add(self, finish: Callable[[str], None]) -> None:
        """Have ``finish(key)`` called, without locks and in the caller's thread; it may block and raise."""
        self._finishers.append(finish)

    def settled(self, key: str) -> str:
        """Return ``key`` once nobody works with it behind the caller's back. Raises TypeError for what is no name."""
        if not isinstance(key, str):
            raise TypeError(f"expected a str as the key, got {type(key).__name__}")
        for finish in self._finishers:
            finish(key)
        return key
