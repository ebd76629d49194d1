"""The random states that decide which batches a loader gives: saved, put back, and watched where they cannot come back.

They are the process's generators, and those of the loader's own parts.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tiered.zero.model_state import RandomState

__all__ = ["BatchDraws", "Counts", "DrawWatch", "RandomParts", "WorkerWatch", "is_stateful", "parts_of", "place_of"]

_log = logging.getLogger("tiered")

Item = TypeVar("Item")

_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    np.random.Generator: (
        lambda part: copy.deepcopy(part.bit_generator.state),
        lambda part, state: setattr(part.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda part: part.get_state(legacy=False), np.random.RandomState.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
}
"""How the state of a generator of each kind is read and set. All other parts have ``state_dict``."""


class RandomParts:
    """The process's generators and ``parts`` by name: generators, and samplers with ``state_dict``.

    ``kept`` names the parts that a replay must leave alone, since it does not load the items that draw from them.
    """

    def __init__(self, parts: dict[str, Any], *, kept: frozenset[str] = frozenset()) -> None:
        self._parts = parts
        self._kept = kept

    @property
    def names(self) -> list[str]:
        """The names of the parts that a resumed loader must have; counts are taken as they come."""
        return sorted(name for name, part in self._parts.items() if not isinstance(part, Counts))

    def states(self) -> dict[str, Any]:
        """Return copies of all states, of types that a commit can carry."""
        return {"process": RandomState().state_dict(), "parts": self.part_states()}

    def part_states(self) -> dict[str, Any]:
        """Return copies of the states of the parts alone."""
        return {name: _state(part) for name, part in self._parts.items()}

    def restore(
        self, parts: dict[str, Any], process: dict[str, Any] | None = None, *, kept: bool | None = None
    ) -> None:
        """Set the parts and, where ``process`` is given, the process's generators to what ``states`` returned.

        With ``kept``, of the parts only those are set that a replay leaves alone; with ``kept=False`` only the others.
        """
        if process is not None:
            RandomState().load_state_dict(process)
        for name in self._parts.keys() & parts.keys():
            if kept is None or kept == (name in self._kept):
                _set_state(self._parts[name], parts[name])

    @contextmanager
    def replaying(self, start: dict[str, Any]) -> Iterator[None]:
        """Set everything but the kept parts to ``start``; at the end put the process's generators back."""
        found = RandomState().state_dict()
        try:
            self.restore(**start, kept=False)
            yield
        finally:
            RandomState().load_state_dict(found)


class Counts:
    """The numbers among the attributes of ``owner`` that have changed since this was made.

    A sampler, or an iterable, that counts its passes by itself shuffles by such a number.
    """

    def __init__(self, owner: object) -> None:
        self._attributes: dict[str, Any] = getattr(owner, "__dict__", {})
        self._first = self._numbers()

    def _numbers(self) -> dict[str, int | float]:
        return {name: value for name, value in self._attributes.items() if isinstance(value, int | float)}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers that have changed, by name."""
        return dict(self._numbers().items() - self._first.items())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the numbers of ``state``, and all others to what they were at first."""
        for name in self._numbers().keys() - self._first.keys():
            del self._attributes[name]  # its class has the first one
        self._attributes.update(self._first | state)


def parts_of(loader: DataLoader[Any], *, loads_again: bool) -> RandomParts:
    """Return the parts of a torch ``loader``. ``loads_again``: a resumed loader loads the used items again."""
    parts: dict[str, Any] = {}
    owners: dict[int, tuple[str, object]] = {id(loader): ("loader", loader)}
    waiting = list(owners.values())
    for name, owner in waiting:
        if owner is not loader:
            parts[name] = owner if is_stateful(owner) else Counts(owner)
        for attribute, value in getattr(owner, "__dict__", {}).items():
            is_sampler = isinstance(value, Sampler) or attribute in ("sampler", "batch_sampler")
            if is_sampler and id(value) not in owners:
                owners[id(value)] = (f"{name}.{attribute}", value)
                waiting.append(owners[id(value)])
        parts |= _generators(name, owner)
    if isinstance(loader.dataset, IterableDataset):
        parts["loader.dataset"] = Counts(loader.dataset)
    known = {id(part) for part in parts.values()}
    data_parts = _generators("loader.dataset", loader.dataset)
    kept = () if loads_again else (name for name, part in data_parts.items() if id(part) not in known)
    return RandomParts(data_parts | parts, kept=frozenset(kept))


def place_of(loader: DataLoader[Any]) -> str:
    """Return the name of the attribute of ``loader`` that has the sampler whose items are loaded as a batch."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def is_stateful(item: object) -> bool:
    """Return whether ``item`` has a state to commit."""
    return all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict"))


class DrawWatch:
    """Sees whether an iterator draws from the process's generators after its first item, in turn with the loop.

    Its draws then depend on those of the loop, which a resumed run does not repeat: a warning says so, once, and names
    ``owner``. ``even_alone``: a draw counts although the loop draws nothing from the same generator.
    """

    def __init__(self, owner: object, *, even_alone: bool = False, is_on: bool = True) -> None:
        self._owner = type(owner).__name__
        self._is_on = is_on
        self._even_alone = even_alone
        self._last: list[Any] | None = None  # the states when the iterator gave its last item

    def begin(self) -> None:
        """Another iterator begins."""
        self._last = None

    def next(self, items: Iterator[Item]) -> Item:
        """Return the next item, and look."""
        if not self._is_on:
            return next(items)
        before = _drawn_states()
        item = next(items)
        after = _drawn_states()
        if self._last is not None:
            states = zip(self._last, before, after, strict=True)
            if any(now != then and (self._even_alone or then != last) for last, then, now in states):
                self._is_on = False
                _log.warning(
                    "%s draws from the process's random generators between batches, as the loop does: a run that is"
                    " resumed in the middle of an epoch may get other batches; expected a generator of its own, as an"
                    " attribute or in its state",
                    self._owner,
                )
        self._last = after
        return item


class WorkerWatch:
    """Stands in for the ``collate_fn`` and ``worker_init_fn`` of ``loader``, and sees whether its workers draw.

    The warning names the workers as ``whose``, and expects ``instead``. ``loader`` gets both functions in place.
    """

    def __init__(self, loader: DataLoader[Any], whose: str, instead: str) -> None:
        self._has_drawn = torch.zeros(1, dtype=torch.bool, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._warning: tuple[str, str] | None = whose, instead
        self._collate_fn = loader.collate_fn
        self._worker_init_fn = loader.worker_init_fn
        self._generators = list(_generators("", loader.dataset).values())
        self._before: object = None
        vars(loader).update(collate_fn=self._collate, worker_init_fn=self._start_worker)  # torch refuses an assignment

    def _start_worker(self, number: int) -> None:
        """Call the user's function, and look from then on."""
        if self._worker_init_fn is not None:
            self._worker_init_fn(number)
        self._before = _drawn_states(self._generators)

    def _collate(self, items: Any) -> Any:
        """Return the batch that the user's function makes of ``items``, drawn for by now."""
        batch = self._collate_fn(items)
        if not self._has_drawn:
            before, self._before = self._before, _drawn_states(self._generators)
            if before != self._before:
                self._has_drawn.fill_(True)
        return batch

    def warn(self) -> None:
        """Log, once, that a worker has drawn, if one has."""
        if self._warning is not None and self._has_drawn:
            _warn_of_draws(*self._warning)
            self._warning = None


class BatchDraws(BatchSampler):
    """Stands in for the batch sampler of a training ``DataLoader``, and puts random states back where it draws.

    accelerate's loader makes one batch ahead. Where its items or its collator draw, the batch was drawn for before the
    commit, and the next one is drawn for after it: a resumed run does the same. ``state_dict`` has the states when the
    sampler of the epoch was made and when it first drew, and before each batch that was made and not used yet. Draws
    that cannot come back, of worker processes or of iterable data, are warned of once.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        place = place_of(loader)
        self._sampler: Any = getattr(loader, place)
        self._random = parts_of(loader, loads_again=False)
        innermost = getattr(self._sampler, "sampler", self._sampler)
        is_known = type(innermost).__module__.startswith(("torch.", "accelerate.", "transformers."))
        self._watch = DrawWatch(innermost, is_on=not is_known)  # the known ones draw before their first item alone
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_warned = False  # of what a stream draws
        self._start: list[dict[str, Any]] = []  # the states when the sampler was made, and when it first drew
        self._pending: deque[dict[str, Any]] = deque()
        self._resumed: dict[str, Any] | None = None
        self.makes_here = loader.num_workers == 0
        workers = "worker processes of the DataLoader", "dataloader_num_workers=0"
        self._worker_watch = None if self.makes_here else WorkerWatch(loader, *workers)
        vars(loader)[place] = self  # torch refuses an assignment

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["start"]:
            self._random.restore(**resumed["start"][0], kept=False)
        self._pending.clear()
        self._start = [self._random.states()]
        self._watch.begin()
        return self._indices(iter(self._sampler), resumed)

    def _indices(self, batches: Iterator[Any], resumed: dict[str, Any] | None) -> Iterator[Any]:
        made: list[dict[str, Any]] = []
        first = 0  # the number of the next batch, counted from the first that is made in this process
        if resumed is not None:
            if resumed["start"]:
                self._random.restore(**resumed["start"][1], kept=False)
            made, first = resumed["made"], -resumed["position"]
        self._start.append(self._random.states())
        for number in itertools.count(first):
            if resumed is not None and number == len(made):
                self._random.restore(**resumed["then"], kept=True)
            try:
                indices = self._watch.next(batches)
            except StopIteration:
                return
            if 0 <= number < len(made):
                self._random.restore(**made[number], kept=True)
            if number >= 0 and self.makes_here:
                self._pending.append(self._random.states())
            before = _drawn_states() if self._is_stream and number == 0 else None
            yield indices
            if before is not None and before != _drawn_states() and not self._is_warned:
                self._is_warned = True
                _warn_of_draws("iterable data", "a data set with __getitem__")

    def used(self, number: int) -> None:
        """The loop has taken ``number`` batches. Logs, once, draws of workers, which a resumed epoch does not have."""
        for _ in range(min(number, len(self._pending))):
            self._pending.popleft()
        if self._worker_watch is not None:
            self._worker_watch.warn()

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
        self._random.restore(state["parts"])
        if not position or len(state["start"]) == 1:
            return False
        then = {"process": process, "parts": state["parts"]}
        self._resumed = {**state, "position": position, "then": then}
        return self.makes_here and not self._is_stream


def _warn_of_draws(what: str, instead: str) -> None:
    _log.warning(
        "%s draw random numbers: a run that is resumed in the middle of an epoch draws others from there on; expected"
        " %s",
        what,
        instead,
    )


def _drawn_states(parts: Iterable[Any] = ()) -> list[Any]:
    """Return the states of the process's generators and of ``parts``; they compare unequal once one was drawn from."""
    states = [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate(), *map(_state, parts)]
    return [_comparable(state) for state in states]


def _comparable(state: Any) -> Any:
    """Return ``state`` with the bytes of tensors and arrays in their place."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return np.asarray(state).tobytes() if isinstance(state, torch.Tensor | np.ndarray) else state


def _generators(name: str, owner: object) -> dict[str, Any]:
    """Return the attributes of ``owner``, called ``name``, that are generators of random numbers."""
    attributes = getattr(owner, "__dict__", {})
    return {f"{name}.{key}": value for key, value in attributes.items() if isinstance(value, tuple(_GENERATORS))}


def _state(part: Any) -> Any:
    for kind, (read, _) in _GENERATORS.items():
        if isinstance(part, kind):
            return read(part)
    return copy.deepcopy(part.state_dict())


def _set_state(part: Any, state: Any) -> None:
    for kind, (_, write) in _GENERATORS.items():
        if isinstance(part, kind):
            write(part, state)
            return
    part.load_state_dict(copy.deepcopy(state))
