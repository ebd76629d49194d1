"""tiered.resumable: a loader whose epoch, position and order of batches come back with a commit.

Making an iterator draws random numbers, and the loop draws from the same generators after that. So a resumed loader
makes its iterator under the random state that was there when the epoch began, passes over the batches that were used,
and puts back the random state that it found.

torch's DataLoader makes an iterator in this order: ``iter(sampler)``, a draw of the workers' seed, and then, at once
with workers and at the first batch without, the sampler's first item, for which it draws. Workers that persist are made
in the first epoch; in a later one there is no draw of a seed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tiered.errors import UsageError
from tiered.loader.random_parts import Counts, DrawWatch, RandomParts, WorkerWatch, is_stateful, parts_of, place_of

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
    if is_stateful(loader):
        return _StatefulLoader(loader)
    if isinstance(loader, DataLoader):
        return _TorchLoader(loader, replay=replay)
    return ResumableLoader(loader, RandomParts({"loader": Counts(loader)}), DrawWatch(loader))


class ResumableLoader(Generic[Batch]):
    """A loader that knows its epoch and position, made by ``tiered.resumable``; one thread and one pass at a time.

    A pass that is left before its end, by ``break``, keeps its place: a commit has it, and a resumed run goes on there.
    In the same process the next ``iter`` begins a new epoch, as that of the loader within does.

    Of any iterable, whose parts are ``random``, a resumed epoch loads the used batches again, and drops them.
    """

    def __init__(self, loader: Iterable[Batch], random: RandomParts, watch: DrawWatch) -> None:
        self.loader = loader
        self._random = random
        self._watch = watch
        self._has_workers = False  # whether the next epoch finds the worker processes of the last one
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
        resumed = self._resumed
        if resumed is None:
            if self._place is not None and self._place.position:
                self._epoch += 1
            place = _Place(start=self._random.states(), had_workers=self._has_workers)
            batches = self._begin()
        else:
            place = _Place(resumed["start"], resumed["has_workers"], resumed["position"])
            batches = self._resume(place.start, place.position)
        self._place, self._resumed = place, None
        return _Batches(self, place, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, random states and the loader's facts, in types that ``Store.register`` takes."""
        if self._resumed is not None:
            return self._resumed
        place = self._place
        return {
            "epoch": self._epoch,
            "position": self.position,
            "has_workers": self._has_workers if place is None else place.had_workers,
            "start": None if place is None else place.start,
            "parts": self._random.part_states(),
            "own": self._own_state(),
            "loader": self._facts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state`` was taken; an iterator that was begun before is over.

        Raises UsageError with the differences, and stays where it is, when ``state`` is another loader's.
        """
        mine, committed = self._facts(), state["loader"]
        names = sorted(name for name in mine.keys() | committed.keys() if committed.get(name) != mine.get(name))
        if names:
            differences = [f"{name} was {committed.get(name)!r}, is {mine.get(name)!r}" for name in names]
            raise UsageError(
                f"the commit was made with another loader: {'; '.join(differences)}; expected the loader of the run"
                " that is resumed, or another directory"
            )
        self._has_workers = state["has_workers"]
        self._random.restore(state["parts"])
        self._restore_own(state["own"])
        self._epoch, self._place = state["epoch"], None
        self._resumed = None if state["start"] is None else state

    def _next(self, place: _Place, batches: Iterator[Batch]) -> Batch:
        if place.is_over:
            raise StopIteration
        if place is not self._place:
            raise UsageError(
                "this iterator is over: after it another one was made, or a state loaded (resume, rollback);"
                " expected the loop to begin anew with iter(loader)"
            )
        try:
            batch = self._take(batches)
        except StopIteration:
            self._epoch, self._place, place.is_over = self._epoch + 1, None, True
            raise
        place.position += 1
        return batch

    def __repr__(self) -> str:
        return f"ResumableLoader({type(self.loader).__name__}, epoch={self.epoch}, position={self.position})"

    # -- what depends on the kind of loader ----------------------------------------------------------------------

    def _begin(self) -> Iterator[Batch]:
        """Return an iterator over a whole epoch, made as the loop itself would make it."""
        self._watch.begin()
        return iter(self.loader)

    def _resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the batches after ``position`` of the epoch that began at ``start``.

        The process's generators are left as they were found. Raises UsageError where there are fewer batches.
        """
        with self._random.replaying(start):
            batches = self._begin()
            _pass_over(batches, position)
        return batches

    def _take(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch. Logs, once, a use that would make a resumed epoch differ."""
        return self._watch.next(batches)

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a resumed loader must agree in."""
        return {"type": type(self.loader).__name__, "batches": _length(self.loader), "parts": self._random.names}

    def _own_state(self) -> Any:
        """Return a copy of the state that the loader has of its own, if any."""
        return None

    def _restore_own(self, state: Any) -> None:
        """Set the state that the loader has of its own."""


@dataclass(slots=True)
class _Place:
    """Where an epoch is. ``start`` are the random states that were there before its iterator was made."""

    start: dict[str, Any]
    had_workers: bool
    position: int = 0
    is_over: bool = False


@dataclass(eq=False, repr=False)
class _Batches(Iterator[Batch]):
    """One epoch's iterator. The loader does not know it: torch ends workers at once where no cycle holds them."""

    loader: ResumableLoader[Batch]
    place: _Place
    batches: Iterator[Batch]

    def __next__(self) -> Batch:
        return self.loader._next(self.place, self.batches)


class _StatefulLoader(ResumableLoader[Batch]):
    """A loader with a state of its own, which says where it goes on."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, RandomParts({}), DrawWatch(loader, even_alone=True))
        self._state = loader

    def _resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the rest, as the loader's own state says.

        Its first batch is taken under the random state of the epoch's start, too, because a generator function begins
        to run then.
        """
        with self._random.replaying(start):
            batches = self._begin()
            then = self._random.states()
        return self._first_under(then, batches)

    def _first_under(self, start: dict[str, Any], batches: Iterator[Batch]) -> Iterator[Batch]:
        with self._random.replaying(start):
            first = list(itertools.islice(batches, 1))
        yield from first
        yield from batches

    def _facts(self) -> dict[str, Any]:
        return {"type": type(self.loader).__name__}  # a loader with a state refuses a state that is not its own

    def _own_state(self) -> Any:
        return copy.deepcopy(self._state.state_dict())

    def _restore_own(self, state: Any) -> None:
        self._state.load_state_dict(copy.deepcopy(state))


class _TorchLoader(ResumableLoader[Batch]):
    """A DataLoader without a state of its own. A resumed epoch skips used items, or with ``loads_again`` loads them.

    The loader that is iterated is a copy, with a sampler of ours around its own, and a ``WorkerWatch`` where workers
    may draw what cannot come back. It keeps the worker processes that persist, until a state is loaded.
    """

    def __init__(self, loader: DataLoader[Any], *, replay: bool) -> None:
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._loads_again = replay or self._is_iterable
        self._persists = loader.persistent_workers and loader.num_workers > 0
        if replay and self._persists and not self._is_iterable:
            raise ValueError(
                "resumable: replay=True cannot bring back what workers draw that persist from epoch to epoch;"
                " expected persistent_workers=False, or replay=False"
            )
        loads_here = loader.num_workers == 0 and self._loads_again
        parts = parts_of(loader, loads_again=self._loads_again)
        super().__init__(loader, parts, DrawWatch(loader, is_on=loads_here))
        self._sampler = _SkippingSampler(getattr(loader, place_of(loader)))
        self._torch_loader = copy.copy(loader)
        vars(self._torch_loader).update({place_of(loader): self._sampler, "_iterator": None})  # torch refuses to assign
        self._worker_watch: WorkerWatch | None = None
        if loader.num_workers > 0 and (self._persists or not self._loads_again):
            ways = ["persistent_workers=False"] * self._persists
            ways += ["tiered.resumable(loader, replay=True), which loads again what was used"] * (not self._loads_again)
            whose = "worker processes of a DataLoader"
            self._worker_watch = WorkerWatch(self._torch_loader, whose, " and ".join(ways))

    def _begin(self) -> Iterator[Batch]:
        if self._has_workers and self._torch_loader._iterator is None:
            self._make_workers()
        self._has_workers = self._persists
        self._watch.begin()
        return iter(self._torch_loader)

    def _make_workers(self) -> None:
        """Make workers that persist without anything to do, as the epochs before left them."""
        found = self._random.states()
        self._sampler.is_empty = True
        try:
            iter(self._torch_loader)
        finally:
            self._sampler.is_empty = False
            self._random.restore(**found)

    def _resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        if self._loads_again:
            return super()._resume(start, position)
        with self._random.replaying(start):
            self._sampler.position = position
            try:
                batches = self._begin()
                assert self._sampler.last is not None
                self._sampler.last.start()  # order: under the start's random state; no item may have been asked for yet
            finally:
                self._sampler.position = 0
        return batches

    def _take(self, batches: Iterator[Batch]) -> Batch:
        batch = super()._take(batches)
        if self._worker_watch is not None:
            self._worker_watch.warn()
        return batch

    def _facts(self) -> dict[str, Any]:
        return {
            "type": type(self.loader).__name__,
            "batches": None if self._is_iterable else _length(self.loader),  # torch warns of one that told its length
            "items": _length(self._torch_loader.dataset),
            "batch_size": self._torch_loader.batch_size,
            "drop_last": self._torch_loader.drop_last,
            "sampler": self._sampler.name,
            "num_workers": self._torch_loader.num_workers if self._is_iterable else None,
            "persistent_workers": self._persists,
            "parts": self._random.names,
        }

    def _restore_own(self, state: Any) -> None:
        vars(self._torch_loader)["_iterator"] = None  # its workers may be at work for a pass that is over


class _SkippingSampler(Sampler[Any]):
    """The sampler within. An iterator that is made while ``position`` is set passes over as many items."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.is_empty = False
        self.position = 0
        innermost = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        names = [type(sampler).__name__] + [type(innermost).__name__] * (innermost is not sampler)
        self.name = " of ".join(names)  # with the sampler within one that is torch's for batches
        is_torchs = type(innermost).__module__.startswith("torch.utils.data")
        self._watch = DrawWatch(innermost, is_on=not is_torchs)  # torch's draw before their first item alone
        self.last: _Indices | None = None  # its last iterator

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        self._watch.begin()
        self.last = _Indices(iter(self.sampler), self.position, self._watch)
        return self.last

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # its own TypeError is the right one


@dataclass(eq=False, repr=False)
class _Indices(Iterator[Any]):
    """The items of a sampler after the first ``position``, which are passed over when it starts."""

    items: Iterator[Any]
    position: int
    watch: DrawWatch

    def start(self) -> None:
        """Pass over the used items, unless that was done."""
        position, self.position = self.position, 0
        _pass_over(self.items, position)

    def __next__(self) -> Any:
        self.start()
        return self.watch.next(self.items)


def _pass_over(batches: Iterator[object], position: int) -> None:
    """Take ``position`` items. Raises UsageError where there are fewer."""
    for number in range(position):
        try:
            next(batches)
        except StopIteration:
            raise UsageError(
                f"the loader ends after {number} batches of an epoch of which {position} were used;"
                " expected the data of the run that is resumed"
            ) from None


def _length(loader: object) -> int | None:
    """Return the length of ``loader``, None where it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
