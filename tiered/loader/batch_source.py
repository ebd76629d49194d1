"""How each kind of loader is begun, and begun again in the middle of an epoch.

Any iterable is loaded again from the start; a loader with a state of its own is not. torch's are in torch_source.py.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from tiered.errors import UsageError
from tiered.loader.random_parts import DrawWatch, RandomParts
from tiered.store.generations.registry import Stateful

__all__ = ["BatchSource", "StatefulSource", "length", "warn_of_turns"]

_log = logging.getLogger("tiered")

Batch = TypeVar("Batch")


class BatchSource(Generic[Batch]):
    """Any iterable: a resumed epoch loads the used items again, and drops them."""

    def __init__(self, loader: Iterable[Batch], random: RandomParts) -> None:
        self.random = random
        self.has_workers = False  # whether the next epoch finds the worker processes of the last one
        self._loader = loader
        self._watch: DrawWatch | None = DrawWatch()

    def begin(self) -> Iterator[Batch]:
        """Return an iterator over a whole epoch, made as the loop itself would make it."""
        if self._watch is not None:
            self._watch.begin()
        return iter(self._loader)

    def next(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch. Logs, once, a use that would make a resumed epoch differ."""
        if self._watch is None:
            return next(batches)
        batch = self._watch.next(batches)
        if self._watch.has_seen:
            self._watch = None
            warn_of_turns(self._loader)
        return batch

    def resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the batches after ``position`` of the epoch that began at ``start``.

        The process's generators are left as they were found.
        """
        with self.random.replaying(start):
            batches = self.begin()
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

    def description(self) -> dict[str, Any]:
        """Return the facts that a resumed loader must agree in."""
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


class StatefulSource(BatchSource[Batch]):
    """A loader with a state of its own, which says where it goes on."""

    def __init__(self, loader: Iterable[Batch], state: Stateful) -> None:
        super().__init__(loader, RandomParts({}))
        self._state = state
        self._watch = DrawWatch(even_alone=True)

    def resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the rest, as the loader's own state says.

        Its first batch is taken under the random state of the epoch's start, too, because a generator function begins
        to run then.
        """
        with self.random.replaying(start):
            batches = self.begin()
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
        """Return the type alone: a loader with a state refuses a state that is not its own."""
        return {"type": type(self._loader).__name__}


def warn_of_turns(owner: object) -> None:
    """Log that ``owner`` draws between the loop's draws."""
    _log.warning(
        "%s draws from the process's random generators between batches, as the loop does: a run that is resumed in the"
        " middle of an epoch may get other batches; expected a generator of its own, as an attribute or in its state",
        type(owner).__name__,
    )


def length(loader: object) -> int | None:
    """Return the length of ``loader``, None where it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
