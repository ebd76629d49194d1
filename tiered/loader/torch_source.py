"""torch's DataLoader: its sampler skips used items of a map-style data set; of other data they are loaded and dropped.

The iterated loader is a copy, with a sampler, collate_fn and worker_init_fn of ours around its own. torch makes an
iterator in this order: ``iter(sampler)``, a draw of the workers' seed, and then, at once
with workers and at the first batch without, the sampler's first item, for which it draws. Workers that persist are made
in the first epoch; in a later one there is no draw of a seed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tiered.loader.batch_source import BatchSource, length, warn_of_turns
from tiered.loader.random_parts import DrawWatch, drawn_states, generators, parts_of

__all__ = ["TorchSource", "WorkerWatch"]

_log = logging.getLogger("tiered")

Batch = TypeVar("Batch")


class TorchSource(BatchSource[Batch]):
    """A DataLoader without a state of its own. A resumed epoch skips used items, or with ``loads_again`` loads them.

    It keeps the worker processes that persist, as long as it lives.
    """

    def __init__(self, loader: DataLoader[Any], *, replay: bool) -> None:
        self._loads_again = replay or isinstance(loader.dataset, IterableDataset)
        self._persists = loader.persistent_workers and loader.num_workers > 0
        if replay and self._persists and not isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                "resumable: replay=True cannot bring back what workers draw that persist from epoch to epoch;"
                " expected persistent_workers=False, or replay=False"
            )
        self._torch_loader = copy.copy(loader)
        super().__init__(self._torch_loader, parts_of(loader, loads_again=self._loads_again))
        self._sampler = _SkippingSampler(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        changes: dict[str, Any] = {place: self._sampler, "_iterator": None}
        if loader.num_workers > 0 or not self._loads_again:
            self._watch = None  # the main process loads nothing, or nothing again
        self._worker_watch: WorkerWatch | None = None
        if loader.num_workers > 0 and (self._persists or not self._loads_again):
            self._worker_watch = WorkerWatch(loader)
            changes |= {"collate_fn": self._worker_watch.collate, "worker_init_fn": self._worker_watch.start_worker}
        vars(self._torch_loader).update(changes)  # torch refuses these as attributes of a loader that is made
        self._is_made = False

    def begin(self) -> Iterator[Batch]:
        """Return an iterator over a whole epoch."""
        if self.has_workers and not self._is_made:
            self._make_workers()
        self.has_workers, self._is_made = self._persists, True
        return super().begin()

    def _make_workers(self) -> None:
        """Make workers that persist without anything to do, as the epochs before left them."""
        self._sampler.is_empty = True
        try:
            with self.random.unchanged():
                iter(self._loader)
        finally:
            self._sampler.is_empty = False

    def resume(self, start: dict[str, Any], position: int) -> Iterator[Batch]:
        """Return an iterator over the batches after ``position``; the process's generators stay as they were."""
        with self.random.replaying(start):
            if self._loads_again:
                batches = self.begin()
                self.pass_over(batches, position)
                return batches
            self._sampler.pass_over = lambda indices: self.pass_over(indices, position)
            try:
                batches = self.begin()
                self._sampler.start()  # order: under the start's random state; without workers no item was asked for
            finally:
                self._sampler.pass_over = None
        return batches

    def next(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch. Logs, once each, uses that would make a resumed epoch differ."""
        batch = super().next(batches)
        if self._worker_watch is not None and self._worker_watch.has_drawn:
            self._warn_of_workers()
        if self._sampler.watch is not None and self._sampler.watch.has_seen:
            self._sampler.watch = None
            warn_of_turns(self._sampler.innermost)
        return batch

    def _warn_of_workers(self) -> None:
        self._worker_watch = None
        ways = ["persistent_workers=False"] * self._persists
        ways += ["tiered.resumable(loader, replay=True), which loads again what was used"] * (not self._loads_again)
        _log.warning(
            "worker processes of a DataLoader draw random numbers: a run that is resumed in the middle of an epoch"
            " draws others from there on; expected %s",
            " and ".join(ways),
        )

    def description(self) -> dict[str, Any]:
        """Return the facts that decide the batches and their order."""
        loader = self._torch_loader
        is_iterable = isinstance(loader.dataset, IterableDataset)
        return {
            "type": type(loader).__name__,
            "batches": None if is_iterable else length(loader),  # torch warns of an iterable that has told its length
            "items": length(loader.dataset),
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "sampler": self._sampler.name,
            "num_workers": loader.num_workers if is_iterable else None,
            "persistent_workers": self._persists,
            "parts": self.random.names,
        }


class _SkippingSampler(Sampler[Any]):
    """The sampler within. Iterators made while ``pass_over`` is set call it with the indices when they start."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.is_empty = False
        self.pass_over: Callable[[Iterator[Any]], None] | None = None
        self.innermost = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
        is_torchs = type(self.innermost).__module__.startswith("torch.utils.data")
        self.watch = None if is_torchs else DrawWatch()  # torch's draw before their first item alone
        self._last: _Indices | None = None

    @property
    def name(self) -> str:
        """The type of the sampler, and of the one within where it is torch's for batches."""
        name = type(self.sampler).__name__
        return name if self.innermost is self.sampler else f"{name} of {type(self.innermost).__name__}"

    def __iter__(self) -> Iterator[Any]:
        if self.is_empty:
            return iter(())
        if self.watch is not None:
            self.watch.begin()
        self._last = _Indices(iter(self.sampler), self.pass_over, self.watch)
        return self._last

    def start(self) -> None:
        """Have the last iterator pass over the used items, if it has not."""
        assert self._last is not None
        self._last.start()

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # its own TypeError is the right one


class _Indices(Iterator[Any]):
    def __init__(
        self, indices: Iterator[Any], pass_over: Callable[[Iterator[Any]], None] | None, watch: DrawWatch | None
    ) -> None:
        self._indices = indices
        self._pass_over = pass_over
        self._watch = watch

    def start(self) -> None:
        pass_over, self._pass_over = self._pass_over, None
        if pass_over is not None:
            pass_over(self._indices)

    def __next__(self) -> Any:
        self.start()
        return next(self._indices) if self._watch is None else self._watch.next(self._indices)


class WorkerWatch:
    """Stands in for a DataLoader's ``collate_fn`` and ``worker_init_fn``, and sees whether workers draw.

    ``has_drawn``, a bool tensor of one element in shared memory, becomes true when one of them has.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.has_drawn = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._collate_fn = loader.collate_fn
        self._worker_init_fn = loader.worker_init_fn
        self._generators = generators(loader.dataset)
        self._before: object = None

    def start_worker(self, number: int) -> None:
        """Call the user's function, and look from then on."""
        if self._worker_init_fn is not None:
            self._worker_init_fn(number)
        self._before = self._seen()

    def collate(self, items: Any) -> Any:
        """Return the batch that the user's function makes of ``items``, drawn for by now."""
        batch = self._collate_fn(items)
        if not self.has_drawn:
            before, self._before = self._before, self._seen()
            if before != self._before:
                self.has_drawn.fill_(True)
        return batch

    def _seen(self) -> object:
        return drawn_states(self._generators.values())
