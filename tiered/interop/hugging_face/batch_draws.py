"""BatchDraws: the random numbers of sampler, items and collator come back in the middle of an epoch.

accelerate's loader makes one batch ahead. Where its items or its collator draw, the batch was drawn for before the
commit, and the next one is drawn for after it: a resumed run does the same.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tiered.loader.batch_source import warn_of_turns
from tiered.loader.random_parts import DrawWatch, drawn_states, parts_of
from tiered.loader.torch_source import WorkerWatch

__all__ = ["BatchDraws"]

_log = logging.getLogger("tiered")


class BatchDraws(BatchSampler):
    """Stands in for the batch sampler of a training ``DataLoader``, and puts random states back where it draws.

    ``state_dict`` has the states when the sampler of the epoch was made and when it first drew, and before each batch
    that was made and not used yet. Draws that cannot come back, of worker processes or of iterable data, are warned of
    once.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler: Any = getattr(loader, place)
        self._random = parts_of(loader, loads_again=False)
        self._innermost = getattr(self._sampler, "sampler", self._sampler)
        is_known = type(self._innermost).__module__.startswith(("torch.", "accelerate.", "transformers."))
        self._watch = None if is_known else DrawWatch()  # the known ones draw before their first item alone
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_warned = False  # of what a stream draws
        self._start: list[dict[str, Any]] = []  # the states when the sampler was made, and when it first drew
        self._pending: deque[dict[str, Any]] = deque()
        self._resumed: dict[str, Any] | None = None
        changes: dict[str, Any] = {place: self}
        self._worker_watch: WorkerWatch | None = None
        self.makes_here = loader.num_workers == 0
        if not self.makes_here:
            self._worker_watch = WorkerWatch(loader)
            changes |= {"collate_fn": self._worker_watch.collate, "worker_init_fn": self._worker_watch.start_worker}
        vars(loader).update(changes)  # torch refuses these as attributes of a loader that is made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["start"]:
            self._random.restart(resumed["start"][0])
        self._pending.clear()
        self._start = [self._random.states()]
        if self._watch is not None:
            self._watch.begin()
        return self._indices(iter(self._sampler), resumed)

    def _indices(self, batches: Iterator[Any], resumed: dict[str, Any] | None) -> Iterator[Any]:
        made: list[dict[str, Any]] = []
        first = 0  # the number of the next batch, counted from the first that is made in this process
        if resumed is not None:
            if resumed["start"]:
                self._random.restart(resumed["start"][1])
            made, first = resumed["made"], -resumed["position"]
        self._start.append(self._random.states())
        for number in itertools.count(first):
            if resumed is not None and number == len(made):
                self._random.restore_kept(resumed["then"])
            try:
                indices = next(batches) if self._watch is None else self._watch.next(batches)
            except StopIteration:
                return
            if 0 <= number < len(made):
                self._random.restore_kept(made[number])
            if number >= 0 and self.makes_here:
                self._pending.append(self._random.states())
            before = drawn_states() if self._is_stream and number == 0 else None
            yield indices
            if before is not None and before != drawn_states() and not self._is_warned:
                self._is_warned = True
                self._warn("iterable data draw", "a data set with __getitem__")

    def used(self, number: int) -> None:
        """The loop has taken ``number`` batches. Logs, once each, draws that would make a resumed epoch differ."""
        for _ in range(min(number, len(self._pending))):
            self._pending.popleft()
        if self._worker_watch is not None and self._worker_watch.has_drawn:
            self._worker_watch = None
            self._warn("worker processes of the DataLoader draw", "dataloader_num_workers=0")
        if self._watch is not None and self._watch.has_seen:
            self._watch = None
            warn_of_turns(self._innermost)

    def _warn(self, what: str, instead: str) -> None:
        _log.warning(
            "%s random numbers: a run that is resumed in the middle of an epoch draws others from there on;"
            " expected %s",
            what,
            instead,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states that a resumed run needs."""
        return {"start": self._start, "made": list(self._pending), "parts": self._random.part_states()}

    @staticmethod
    def state_of_collator(made: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state that says of a pass just the process's random states before each batch ``made``."""
        return {"start": [], "made": [{"process": each, "parts": {}} for each in made], "parts": {}}

    def load_state_dict(self, state: dict[str, Any], position: int, process: dict[str, Any]) -> bool:
        """Have the next pass draw as that of ``state`` did, whose first ``position`` batches are skipped.

        Return whether it also sets ``process``, the committed states of the generators, when the batches that were made
        before the commit are made again.
        """
        self._random.restore_parts(state["parts"])
        if not position or len(state["start"]) == 1:
            return False
        then = {"process": process, "parts": state["parts"]}
        self._resumed = {**state, "position": position, "then": then}
        return self.makes_here and not self._is_stream
