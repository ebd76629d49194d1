"""tiered.resumable: a loader whose epoch, position and order of batches come back with a commit.

Making an iterator draws random numbers, and the loop draws from the same generators after that. So a resumed loader
makes its iterator under the random state that was there when the epoch began, passes over the batches that were used,
and puts back the random state that it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from tiered.errors import UsageError
from tiered.loader.batch_source import BatchSource, StatefulSource
from tiered.loader.random_parts import Counts, RandomParts, is_stateful
from tiered.loader.torch_source import TorchSource

__all__ = ["ResumableLoader", "resumable"]

Batch = TypeVar("Batch")


def resumable(loader: Iterable[Batch], *, replay: bool = False) -> ResumableLoader[Batch]:
    """Return ``loader``, a torch ``DataLoader`` or any iterable, in a form that a store can commit and resume.

    It gives the batches of ``loader``, the same objects, and draws no random number of its own. Register it with the
    store, call ``store.resume()``, then iterate: ``for epoch in range(loader.epoch, 3): for batch in loader: ...``.

    A resumed epoch passes over the used batches as cheaply as the loader allows. A ``DataLoader`` over a map-style data
    set skips them in its sampler, without loading an item. A loader with ``state_dict`` and ``load_state_dict`` of its
    own restores its own position. All others load the used batches and drop them, as does ``replay=True``: pass that
    where worker processes draw random numbers for the items (one warning says so), or where the data set counts the
    items that it has given.

    The generators (torch, numpy, python) are part of the state, and so are the objects with ``state_dict`` that the
    ``DataLoader``, its samplers and its data set have as attributes. Only the loader may draw from its and its
    samplers' generators. Numbers among the attributes of samplers and iterables, such as a count of passes, come back
    as well. A sampler or an iterable that draws from the process's own generators as it goes on, after its
    first item, comes back exactly only where the loop does not draw from the same one; one warning says so.

    Raises TypeError for anything not iterable, ValueError for ``replay`` with ``persistent_workers``, whose generators
    go on from epoch to epoch.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"resumable: expected a DataLoader or another iterable of batches, got {type(loader).__name__}")
    return ResumableLoader(loader, replay=replay)


class ResumableLoader(Generic[Batch]):
    """A loader that knows its epoch and position, made by ``tiered.resumable``; one thread and one pass at a time.

    A pass that is left before its end, by ``break``, keeps its place: a commit has it, and a resumed run goes on there.
    In the same process the next ``iter`` begins a new epoch, as that of the loader within does.
    """

    def __init__(self, loader: Iterable[Batch], *, replay: bool) -> None:
        self.loader = loader
        self._replay = replay
        self._source = _source(loader, replay=replay)
        self._epoch = 0
        self._place: _Place | None = None  # of the epoch that is going on
        self._resumed: dict[str, Any] | None = None  # a state in the middle of an epoch, until the next ``iter``

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch that is going on or, between two, of the next one."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many batches of this epoch were given out."""
        if self._resumed is not None:
            return int(self._resumed["position"])
        return 0 if self._place is None else self._place.position

    def __len__(self) -> int:
        """The number of batches of a whole epoch. Raises TypeError where the loader within has no length."""
        return len(self.loader)  # type: ignore[arg-type]  # its own TypeError is the right one

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the next epoch's batches, or, first after a resume, over the rest of this one's.

        Raises UsageError, and stays where it is, when the loader now has fewer batches than were used.
        """
        source, resumed = self._source, self._resumed
        if resumed is None:
            if self._place is not None and self._place.position:
                self._epoch += 1
            place = _Place(start=source.random.states(), had_workers=source.has_workers)
            batches = source.begin()
        else:
            place = _Place(resumed["start"], resumed["has_workers"], resumed["position"])
            batches = source.resume(place.start, place.position)
        self._place, self._resumed = place, None
        return _Batches(self, place, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, random states and the loader's facts, in types that ``Store.register`` takes."""
        if self._resumed is not None:
            return self._resumed
        place, source = self._place, self._source
        return {
            "epoch": self._epoch,
            "position": self.position,
            "has_workers": source.has_workers if place is None else place.had_workers,
            "start": None if place is None else place.start,
            "parts": source.random.part_states(),
            "own": source.state_dict(),
            "loader": source.description(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state`` was taken; an iterator that was begun before is over.

        Raises UsageError with the differences, and stays where it is, when ``state`` is another loader's.
        """
        self._source.compare(state["loader"])
        before, self._source = self._source, _source(self.loader, replay=self._replay)  # old workers may be at work
        self._source.random.count_on_from(before.random)
        self._source.has_workers = state["has_workers"]
        self._source.random.restore_parts(state["parts"])
        self._source.load_state_dict(state["own"])
        self._epoch, self._place = state["epoch"], None
        self._resumed = None if state["start"] is None else state

    def _next(self, place: _Place, batches: Iterator[Batch]) -> Batch:
        if place is not self._place:
            raise UsageError(
                "this iterator is over: after it another one was made, or a state loaded (resume, rollback);"
                " expected the loop to begin anew with iter(loader)"
            )
        try:
            batch = self._source.next(batches)
        except StopIteration:
            self._epoch, self._place = self._epoch + 1, None
            raise
        place.position += 1
        return batch

    def __repr__(self) -> str:
        return f"ResumableLoader({type(self.loader).__name__}, epoch={self.epoch}, position={self.position})"


@dataclass(slots=True)
class _Place:
    """Where an epoch is. ``start`` are the random states that were there before its iterator was made."""

    start: dict[str, Any]
    had_workers: bool
    position: int = 0


class _Batches(Iterator[Batch]):
    """One epoch's iterator. The loader does not know it: torch ends workers at once where no cycle holds them."""

    def __init__(self, loader: ResumableLoader[Batch], place: _Place, batches: Iterator[Batch]) -> None:
        self._loader = loader
        self._place = place
        self._batches = batches
        self._is_over = False

    def __next__(self) -> Batch:
        if self._is_over:
            raise StopIteration
        try:
            return self._loader._next(self._place, self._batches)
        except StopIteration:
            self._is_over = True
            raise


def _source(loader: Iterable[Batch], *, replay: bool) -> BatchSource[Batch]:
    state: object = loader
    if is_stateful(state):
        return StatefulSource(loader, state)
    if isinstance(loader, DataLoader):
        return TorchSource(loader, replay=replay)
    return BatchSource(loader, RandomParts({"loader": Counts(loader)}))
