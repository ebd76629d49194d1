"""How each kind of loader is begun, and begun again in the middle of an epoch.

Any iterable is loaded again from the start; a loader with a state of its own is not. torch's are in torch_source.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from tiered.errors import UsageError
from tiered.loader.random_parts import RandomParts
from tiered.store.generations.registry import Stateful

__all__ = ["Source", "StatefulSource", "length"]

Batch = TypeVar("Batch")


class Source(Generic[Batch]):
    """Any iterable: a resumed epoch loads again what was used, and drops it."""

    def __init__(self, loader: Iterable[Batch], random: RandomParts) -> None:
        self.random = random
        self.has_workers = False  # whether the next epoch finds the worker processes of the last one
        self._loader = loader

    def begin(self) -> Iterator[Batch]:
        """Return an iterator over a whole epoch, made as the loop itself would make it."""
        return iter(self._loader)

    def resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over what comes after ``position`` batches of the epoch that began at ``start``.

        The process's generators are left as they were found.
        """
        with self.random.replaying(start):
            batches = iter(self._loader)
            self.pass_over(batches, position)
        return batches

    def pass_over(self, batches: Iterator[object], position: int) -> None:
        """Take ``position`` items. Raises UsageError where there are fewer."""
        for number in range(position):
            try:
                next(batches)
            except StopIteration:
                raise UsageError(
                    f"the loader ends after {number} batches of an epoch of which {position} were used;"
                    " expected the data of the run that is resumed"
                ) from None

    def warn(self) -> None:
        """Log, once, what makes a resumed epoch differ."""

    def description(self) -> dict[str, Any]:
        """Return what a resumed loader must agree in."""
        return {"type": type(self._loader).__name__, "batches": length(self._loader), "parts": self.random.names}

    def compare(self, committed: dict[str, Any]) -> None:
        """Raise UsageError with the differences where the loader that wrote ``committed`` was another one."""
        mine = self.description()
        differences = [
            f"{name} was {committed.get(name)!r}, is {mine.get(name)!r}"
            for name in sorted(mine.keys() | committed.keys())
            if committed.get(name) != mine.get(name)
        ]
        if differences:
            raise UsageError(
                f"the commit was made with another loader: {'; '.join(differences)}; expected the loader of the run"
                " that is resumed, or another directory"
            )

    def state_dict(self) -> Any:
        """Return the state that the loader has of its own, if any."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Set it."""


class StatefulSource(Source[Batch]):
    """A loader with a state of its own, which says where it goes on."""

    def __init__(self, loader: Iterable[Batch], state: Stateful) -> None:
        super().__init__(loader, RandomParts({}))
        self._state = state

    def resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the rest, as the loader's own state says.

        Its first batch is taken under the random state of the epoch's start, too: that is when a generator function
        makes what it iterates over.
        """
        with self.random.replaying(start):
            batches = iter(self._loader)
            then = self.random.states()
        return self._first_under(then, batches)

    def _first_under(self, start: dict[str, Any], batches: Iterator[Batch]) -> Iterator[Batch]:
        with self.random.replaying(start):
            first = list(itertools.islice(batches, 1))
        yield from first
        yield from batches

    def state_dict(self) -> Any:
        """Return a copy of the loader's own state."""
        return copy.deepcopy(self._state.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Hand the loader its state."""
        self._state.load_state_dict(copy.deepcopy(state))

    def description(self) -> dict[str, Any]:
        """Return the type alone: a loader with a state refuses by itself what is not its own."""
        return {"type": type(self._loader).__name__}


def length(loader: object) -> int | None:
    """Return the length of ``loader``, None where it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
