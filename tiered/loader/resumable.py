"""tiered.resumable: a loader whose epoch, position and order of batches come back with a commit.

Making an iterator draws random numbers, and the loop draws from the same generators after that. So a resumed loader
makes its iterator under the random state that was there when the epoch began, passes over the batches that were used,
and puts back the random state that it found.

torch's DataLoader makes an iterator in this order: ``iter(sampler)``, a draw of the workers' seed, and then, at once
with workers and at the first batch without, the sampler's first item, for which it draws.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tiered.errors import UsageError
from tiered.loader.random_parts import Counts, DataWatch, OrderWatch, RandomParts, is_stateful, parts_of, place_of
from tiered.zero.model_state import RandomState

__all__ = ["ResumableLoader", "resumable"]

Batch = TypeVar("Batch")


def resumable(loader: Iterable[Batch], *, replay: bool = False) -> ResumableLoader[Batch]:
    """Return ``loader``, a torch ``DataLoader`` or any iterable, in a form that a store can commit and resume.

    It gives the batches of ``loader``, the same objects, and draws no random number of its own. Register it with the
    store, call ``store.resume()``, then iterate: ``for epoch in range(loader.epoch, 3): for batch in loader: ...``.

    A resumed epoch passes over the used batches. A ``DataLoader`` over a map-style data set skips them in its sampler,
    without loading an item. All others load the used batches and drop them, as does ``replay=True``: pass that where
    worker processes draw random numbers for the items (one warning says so), or where the data set counts the items
    that it has given.

    The generators (torch, numpy, python) are part of the state, and so are the objects with ``state_dict`` that the
    ``DataLoader``, its samplers and its data set have as attributes, or an iterable that has it. Only the loader may
    draw from its and its samplers' generators. Numbers among the attributes of samplers and iterables, such as a count
    of passes, come back as well. A sampler or an iterable that draws from the process's own generators as it goes on,
    after its first item, comes back exactly only where the loop does not draw from the same one; one warning says so.

    Raises TypeError for anything not iterable, UsageError for a loader that accelerate has prepared, ValueError for
    ``persistent_workers``, whose generators go on from epoch to epoch.
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"resumable: expected a DataLoader or another iterable of batches, got {type(loader).__name__}")
    if type(loader).__module__.startswith("accelerate.") and not getattr(loader, "use_stateful_dataloader", False):
        raise UsageError(
            f"resumable: {type(loader).__name__}, made by accelerator.prepare(), keeps no place in its epoch; expected"
            " tiered.resumable(loader) of the loader before, over several ranks with a DistributedSampler: prepare()"
            " leaves it as it is"
        )
    if getattr(loader, "persistent_workers", False):
        raise ValueError(
            "resumable: worker processes that persist draw on from epoch to epoch, and a resumed run cannot bring that"
            " back; expected persistent_workers=False"
        )
    if isinstance(loader, DataLoader) and not is_stateful(loader):
        return _TorchLoader(loader, replay=replay)
    return ResumableLoader(loader, RandomParts({"loader": loader if is_stateful(loader) else Counts(loader)}, {}))


class ResumableLoader(Generic[Batch]):
    """A loader that knows its epoch and position, made by ``tiered.resumable``; one thread and one pass at a time.

    A pass that is left before its end, by ``break``, keeps its place: a commit has it, and a resumed run goes on there.
    In the same process the next ``iter`` begins a new epoch, as that of the loader within does.

    Of any iterable, whose parts are ``random``, a resumed epoch loads the used batches again, and drops them.
    """

    def __init__(self, loader: Iterable[Batch], random: RandomParts) -> None:
        self.loader = loader
        self._random = random
        self._watch = OrderWatch(loader)
        self._epoch = 0
        self._place: _Place | None = None  # of the epoch that is going on
        self._is_resumed = False  # whether the next ``iter`` goes on at the place

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch that is going on or, between two, of the next one."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many batches of this epoch were given out."""
        return 0 if self._place is None else self._place.position

    def __len__(self) -> int:
        """The number of batches of a whole epoch. Raises TypeError where the loader within has no length."""
        return len(self.loader)  # type: ignore[arg-type]  # its own TypeError is the right one

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the next epoch's batches, or, first after a resume, over the rest of this one's.

        Raises UsageError, and stays where it is, when the loader now has fewer batches than were used.
        """
        if self._is_resumed and self._place is not None:
            place = self._place
            found = RandomState().state_dict()
            try:
                self._random.restore_order(place.start)
                batches = self._begin(place.position)
            finally:
                RandomState().load_state_dict(found)
        else:
            if self.position:
                self._epoch += 1
            place = _Place(self._random.states())
            batches = self._begin(0)
        self._place, self._is_resumed = place, False
        return self._batches_from(place, batches)

    def _batches_from(self, place: _Place, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            if place is not self._place:
                raise UsageError(
                    "this iterator is over: after it another one was made, or a state loaded (resume, rollback);"
                    " expected the loop to begin anew with iter(loader)"
                )
            try:
                batch = next(batches)
            except StopIteration:
                break
            place.position += 1
            yield batch
        self._epoch, self._place = self._epoch + 1, None

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position, random states and the loader's facts, in types that ``Store.register`` takes.

        The process's generators are among them: a store without a sharded model commits them nowhere else.
        """
        return {
            "process": RandomState().state_dict(),
            "epoch": self._epoch,
            "position": self.position,
            "start": None if self._place is None else self._place.start,
            "parts": self._random.part_states(),
            "loader": self._facts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state`` was taken; an iterator that was begun before is over.

        A ``DistributedSampler`` of another number of ranks goes on behind the samples that all have used. Raises
        UsageError with the differences, and stays where it is, when ``state`` is another loader's.
        """
        mine, committed = self._facts(), state["loader"]
        position, before = state["position"], committed.get("ranks", mine.get("ranks"))
        if before != mine.get("ranks") and position == committed["batches"]:
            position = mine["batches"]  # at the end of an epoch, whose last batch may be a short one
        elif before != mine.get("ranks"):
            position = _position_over(mine.get("ranks", 1), before or 1, position)
        if mine.get("ranks") != committed.get("ranks"):  # each then has another number of batches
            mine, committed = ({**each, "ranks": None, "batches": None} for each in (mine, committed))
        names = sorted(name for name in mine.keys() | committed.keys() if committed.get(name) != mine.get(name))
        if names:
            differences = [f"{name} was {committed.get(name)!r}, is {mine.get(name)!r}" for name in names]
            raise UsageError(
                f"the commit was made with another loader: {'; '.join(differences)}; expected the loader of the run"
                " that is resumed; or a resume without the loader, then store.drop_state(name) and the new loader,"
                " whose epoch begins anew"
            )
        self._random.restore_parts(state["parts"])
        if "process" in state:  # not in a commit of 0.2.0
            RandomState().load_state_dict(state["process"])
        self._epoch = state["epoch"]
        self._is_resumed = state["start"] is not None
        self._place = _Place(state["start"], position) if self._is_resumed else None

    def __repr__(self) -> str:
        return f"ResumableLoader({type(self.loader).__name__}, epoch={self.epoch}, position={self.position})"

    def _begin(self, position: int) -> Iterator[Batch]:
        """Return an iterator over the batches after ``position``, made as the loop itself would make it.

        Raises UsageError where there are fewer batches.
        """
        batches = self._watch.over(iter(self.loader))
        _pass_over(batches, position)
        return batches

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a resumed loader must agree in."""
        return {"type": type(self.loader).__name__, "batches": _length(self.loader), "parts": self._random.names}


@dataclass(slots=True)
class _Place:
    """Where an epoch is. ``start`` are the random states that were there before its iterator was made."""

    start: dict[str, Any]
    position: int = 0


class _TorchLoader(ResumableLoader[Batch]):
    """A DataLoader without a state of its own. A resumed epoch skips used items, or loads them again.

    The loader that is iterated is a copy, with a sampler of ours around its own, and a ``DataWatch`` where workers may
    draw what cannot come back.
    """

    def __init__(self, loader: DataLoader[Any], *, replay: bool) -> None:
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        self._loads_again = replay or self._is_iterable
        super().__init__(loader, parts_of(loader, loads_again=self._loads_again))
        self._sampler = _SkippingSampler(getattr(loader, place_of(loader)))
        self._torch_loader = copy.copy(loader)
        vars(self._torch_loader)[place_of(loader)] = self._sampler  # torch refuses an assignment
        self._data_watch: DataWatch | None = None
        if loader.num_workers > 0 and not self._loads_again:
            instead = "tiered.resumable(loader, replay=True), which loads again what was used"
            self._data_watch = DataWatch(self._torch_loader, "worker processes of a DataLoader", instead)

    def _begin(self, position: int) -> Iterator[Batch]:
        if self._loads_again:
            batches: Iterator[Batch] = iter(self._torch_loader)
            if not self._torch_loader.num_workers:
                batches = self._watch.over(batches)
            _pass_over(batches, position)
            return batches
        self._sampler.position = position
        batches = iter(self._torch_loader)
        self._sampler.skip()  # order: under the start's random state; no item may have been asked for yet
        return batches if self._data_watch is None else self._data_watch.over(batches)

    def _facts(self) -> dict[str, Any]:
        return {
            "type": type(self.loader).__name__,
            "batches": None if self._is_iterable else _length(self.loader),  # torch warns of one that told its length
            "items": _length(self._torch_loader.dataset),
            "batch_size": self._torch_loader.batch_size,
            "drop_last": self._torch_loader.drop_last,
            "sampler": self._sampler.name,
            **({} if self._sampler.num_ranks is None else {"ranks": self._sampler.num_ranks}),
            "num_workers": self._torch_loader.num_workers if self._is_iterable else None,
            "persistent_workers": False,  # of another run, its random numbers came in another order
            "parts": self._random.names,
        }


class _SkippingSampler(Sampler[Any]):
    """The sampler within, whose one pass at a time begins after ``position`` items."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.position = 0
        innermost = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        names = [type(sampler).__name__] + [type(innermost).__name__] * (innermost is not sampler)
        self.name = " of ".join(names)  # with the sampler within one that is torch's for batches
        self.num_ranks: int | None = getattr(innermost, "num_replicas", None)  # that divide the samples
        is_torchs = type(innermost).__module__.startswith("torch.utils.data")
        self._watch = None if is_torchs else OrderWatch(innermost)  # torch's draw before their first item alone
        self._items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.sampler)
        self._items = items if self._watch is None else self._watch.over(items)
        return self

    def skip(self) -> None:
        """Pass over the used items, unless that was done."""
        position, self.position = self.position, 0
        _pass_over(self._items, position)

    def __next__(self) -> Any:
        self.skip()
        return next(self._items)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # its own TypeError is the right one


def _position_over(num_ranks: int, before: int, position: int) -> int:
    """Return the batches that each of ``num_ranks`` has used, where each of ``before`` has used ``position``.

    Samples are dealt out in turn, as by ``DistributedSampler``. Raises UsageError where that is no whole number.
    """
    if position * before % num_ranks:
        raise UsageError(
            f"the loader: {position} batches of each of {before} ranks are no whole number of batches for {num_ranks};"
            " expected a commit between two epochs, or as many ranks; or a resume without the loader, then"
            " store.drop_state(name) and the new loader, whose epoch begins anew"
        )
    return position * before // num_ranks


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
