"""ConfigSection: one object of a DeepSpeed configuration, read key by key; whatever was not read is told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered.errors import UsageError
from tiered.interop.deepspeed_keys import FILLED, KeyNote, notes_on

__all__ = ["ConfigSection"]

_MOST = 1e18
_AUTO = "auto"  # the Hugging Face Trainer fills these in


class ConfigSection:
    """A mapping under its ``path``, whose notes go into the list that all sections share.

    Values are checked as they are read. UsageError names the key where one is of another kind.
    """

    def __init__(self, values: object, path: str, notes: list[KeyNote]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{path or 'the configuration'}: expected a JSON object, got {_short(values)}")
        self.path = path
        self._values = dict(values)
        self._notes = notes
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether there is a value that is not null."""
        return self._values.get(name) is not None

    def is_auto(self, name: str) -> bool:
        """Return whether the Trainer is to fill the value in."""
        return bool(self._values.get(name) == _AUTO)

    def note(self, outcome: str, reason: str, name: str) -> None:
        """Tell of the key ``name``, which counts as read."""
        self._read.add(name)
        self._notes.append(KeyNote(outcome, reason, self._full(name)))

    def fill(self, name: str, argument: str, value: object) -> None:
        """Tell that "auto" stands for ``argument`` of the Trainer, and which ``value`` is there now."""
        self.note(FILLED, f'"auto": {argument} of the Trainer; here {value}', name)

    def inner(self, name: str) -> ConfigSection:
        """Return the object ``name``, an empty one where there is none."""
        self._read.add(name)
        return ConfigSection(self._values[name] if self.has(name) else {}, self._full(name), self._notes)

    def number(self, name: str, default: Any, *, auto: tuple[str, Any] | None = None) -> Any:
        """Return a number, ``default`` where there is none; None as a default: there must be one.

        ``auto``: the argument of the Trainer's that "auto" stands for, and its default.
        """
        self._read.add(name)
        if self.is_auto(name) and (auto or default is not None):
            argument, value = auto or ("a choice", default)
            self.fill(name, argument, value)
            return value
        return self.fixed_number(name, default)

    def fixed_number(self, name: str, default: Any) -> Any:
        """Return a number that was read before, or ``default`` where it is missing or "auto"."""
        value = default if not self.has(name) or self.is_auto(name) else self._values[name]
        if not _is_number(value):
            raise UsageError(f"{self._full(name)}: expected a number, got {_short(value)}")
        return int(value) if isinstance(value, float) and value.is_integer() and isinstance(default, int) else value

    def switch(self, name: str, default: bool) -> bool:
        """Return a truth value; "auto" is ``default``."""
        self._read.add(name)
        value = default if not self.has(name) or self.is_auto(name) else self._values[name]
        if not isinstance(value, bool):
            raise UsageError(f"{self._full(name)}: expected true or false, got {_short(value)}")
        return value

    def word(self, name: str, default: str) -> str:
        """Return a text."""
        self._read.add(name)
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, str) or not value.isprintable():
            raise UsageError(f"{self._full(name)}: expected a text, got {_short(value)}")
        return value

    def pair(self, name: str, default: tuple[float, float], *, auto: str) -> tuple[float, float]:
        """Return two numbers, such as betas."""
        self._read.add(name)
        if self.is_auto(name):
            self.fill(name, auto, default)
            return default
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, list | tuple) or [*map(_is_number, value)] != [True, True]:
            raise UsageError(f"{self._full(name)}: expected two numbers, got {_short(value)}")
        return float(value[0]), float(value[1])

    def conclude(self) -> None:
        """Tell of each key that nothing has read."""
        for name, value in self._values.items():
            if name not in self._read:
                self._notes += notes_on(self._full(name), value)

    def _full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a number that a setting can be: no NaN, nothing endless."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-8:]}"
