"""Registry: the objects whose state is part of every commit, and the text that carries it.

The text is JSON: ``{"registered": {name: state_dict}, "state": the user's}``, each encoded by state_text.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tiered.bytes.interrupt import outside
from tiered.errors import CorruptionError, UsageError
from tiered.store.format.state_text import decode, encode

__all__ = ["Registry", "Stateful", "committed_state", "encode_user_state", "taking_apart"]

_log = logging.getLogger("tiered")


class Stateful(Protocol):
    """Anything with a state to save and load, such as a scheduler or a loader."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def committed_state(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the user's state and, by name, those of registered objects, from a root's text. CorruptionError."""
    decoded = decode(text)
    parts = [decoded.get(name, {}) for name in ("state", "registered")] if isinstance(decoded, dict) else []
    if not parts or any(not isinstance(part, dict) for part in parts):
        raise CorruptionError("the committed state is no state: restore the directory from a copy")
    return parts[0], parts[1]


@contextmanager
def taking_apart(name: str, *, by: str) -> Iterator[None]:
    """Raise UsageError in place of an error of code that expects another state than was committed for ``name``."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UsageError(
            f"a {by} cannot load the state that was committed for {name!r}: {_short(error)}; "
            "register what the run that committed it has registered, or use another directory"
        ) from error


def _short(error: Exception) -> str:
    text = repr(error)
    return text if len(text) <= 300 else f"{text[:280]} ... {text[-16:]}"


class Registry:
    """Registered objects by name. Their methods are called without locks, in the order of registration.

    The invariant: *a state committed under a name is in every later commit*, unchanged where the name is not registered
    in this process. Only ``drop`` ends that.
    """

    def __init__(self, text: str) -> None:
        """``text`` is the last root's; ``committed_state`` can read it."""
        self._objects: dict[str, Stateful] = {}
        self.carry(text)

    def carry(self, text: str) -> None:
        """Keep the states of the root's ``text`` whose names are not registered."""
        self._carried: dict[str, str] = {
            name: json.dumps(state, separators=(",", ":"))  # as ``encode`` wrote it
            for name, state in json.loads(text).get("registered", {}).items()
            if not name.startswith("$")
        }

    def drop(self, name: str) -> None:
        """Carry ``name`` no further. Raises UsageError for a name that is registered, KeyError for an unknown one."""
        if name in self._objects:
            raise UsageError(
                f"drop_state({name!r}): a {type(self._objects[name]).__name__} is registered under the name; expected a"
                " store that was opened without registering it"
            )
        del self._carried[name]

    def get(self, name: str) -> Stateful | None:
        return self._objects.get(name)

    def __bool__(self) -> bool:
        return bool(self._objects)

    def add(self, name: str, item: Stateful) -> None:
        """Register ``item``. Raises TypeError when its state cannot be encoded, UsageError for a taken name."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                raise TypeError(f"register({name!r}): {type(item).__name__} has no method {method}")
        if not isinstance(name, str) or name.startswith("$"):
            raise ValueError(f"register: expected a name that does not start with '$', got {name!r}")
        if name in self._objects and self._objects[name] is not item:
            raise UsageError(f"register({name!r}): the name is taken by a {type(self._objects[name]).__name__}")
        encode(item.state_dict(), name=f"{name}.state_dict()")
        self._objects[name] = item

    def encode(self, user_text: str) -> str:
        """Return the text of a commit: every registered object's state, others' as committed, and ``user_text``."""
        states = {name: text for name, text in self._carried.items() if name not in self._objects}
        for name, item in list(self._objects.items()):  # another thread may register meanwhile
            state = _call(item, "state_dict")
            states[name] = encode(state, name=f"{name}.state_dict()")
        parts = (f"{json.dumps(name)}:{text}" for name, text in states.items())
        return f'{{"registered":{{{",".join(parts)}}},"state":{user_text}}}'

    def steps(self) -> dict[str, int]:
        """Return, by its name, how many steps each of tiered's own optimizers has made."""
        steps: dict[str, int] = {}
        for name, item in list(self._objects.items()):
            if name.startswith("tiered.") and hasattr(item, "num_steps"):
                steps[name] = item.num_steps()
        return steps

    def check(self, committed: Mapping[str, Any], generation: int) -> None:
        """Raise UsageError for a registered name that is not in ``committed``; warn of unregistered ones that are."""
        missing = [name for name in self._objects if name not in committed]
        unclaimed = [name for name in committed if name not in self._objects]
        if missing:
            raise UsageError(
                f"generation {generation} was committed without some objects that are registered now: missing "
                f"{', '.join(map(repr, missing))}; committed but not registered: "
                f"{', '.join(map(repr, unclaimed)) or 'nothing'}; register the same names as the run that committed it,"
                " and what is new after resume()"
            )
        if unclaimed:
            _log.warning(
                "generation %d holds the state of %s, which is not registered: it is not loaded, and commits keep "
                "it as it is; store.drop_state(name) ends that",
                generation,
                ", ".join(map(repr, unclaimed)),
            )

    def load(self, committed: Mapping[str, Any]) -> None:
        """Hand every registered object its state. UsageError where one cannot take it; those before it have theirs."""
        for name, item in list(self._objects.items()):
            with taking_apart(name, by=type(item).__name__):
                _call(item, "load_state_dict", committed[name])


def _call(item: Stateful, name: str, *args: Any) -> Any:
    """Call a method of ``item``; where it is the caller's, the actions of signals run at once there."""
    method = getattr(item, name)
    return method(*args) if type(item).__module__.partition(".")[0] == "tiered" else outside(method, *args)


def encode_user_state(state: object) -> str:
    """Return the text of the state a caller commits. Raises TypeError for anything that cannot be encoded."""
    if not isinstance(state, Mapping):
        raise TypeError(f'commit: expected state as a mapping such as {{"step": 3}}, got {type(state).__name__}')
    return encode(dict(state), name="state")
