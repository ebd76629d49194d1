"""The random states that decide which batches a loader gives, saved and put back, and watches of other draws."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from tiered.zero.model_state import RandomState

__all__ = ["BatchDraws", "Counts", "DataWatch", "OrderWatch", "RandomParts", "is_stateful", "parts_of", "place_of"]

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
    """The process's generators, parts that decide the ``order`` of batches, and generators of the ``data`` set.

    The parts have names, and are generators or have ``state_dict``. A pass that goes through the used batches again
    begins with the states of the order, and leaves those of the data.
    """

    def __init__(self, order: dict[str, Any], data: dict[str, Any]) -> None:
        self._order = order
        self._data = data

    @property
    def names(self) -> list[str]:
        """The names of the parts that a resumed loader must have; counts are taken as they come."""
        parts = self._data | self._order
        return sorted(name for name, part in parts.items() if not isinstance(part, Counts))

    def states(self) -> dict[str, Any]:
        """Return copies of all states, of types that a commit can carry."""
        return {"process": RandomState().state_dict(), "parts": self.part_states()}

    def part_states(self) -> dict[str, Any]:
        """Return copies of the states of the parts alone."""
        return {name: _state(part) for name, part in (self._data | self._order).items()}

    def restore_parts(self, states: dict[str, Any]) -> None:
        """Set the parts to what ``part_states`` returned."""
        _set_states(self._data | self._order, states)

    def restore_order(self, states: dict[str, Any]) -> None:
        """Set the process's generators and the parts of the order to what ``states`` returned."""
        RandomState().load_state_dict(states["process"])
        _set_states(self._order, states["parts"])

    def restore_data(self, states: dict[str, Any]) -> None:
        """Set the process's generators and those of the data set to what ``states`` returned."""
        RandomState().load_state_dict(states["process"])
        _set_states(self._data, states["parts"])


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
    order = _order_parts("loader", loader, {id(loader)})
    if isinstance(loader.dataset, IterableDataset):
        order["loader.dataset"] = Counts(loader.dataset)
    known = {id(part) for part in order.values()}
    data = {name: part for name, part in _generators("loader.dataset", loader.dataset).items() if id(part) not in known}
    return RandomParts(order | data, {}) if loads_again else RandomParts(order, data)


def _order_parts(name: str, owner: object, seen: set[int]) -> dict[str, Any]:
    """Return the generators of ``owner``, called ``name``, and all parts of the samplers within."""
    parts = _generators(name, owner)
    for attribute, value in getattr(owner, "__dict__", {}).items():
        is_sampler = isinstance(value, Sampler) or attribute in ("sampler", "batch_sampler")
        if is_sampler and id(value) not in seen:
            seen.add(id(value))
            inner = f"{name}.{attribute}"
            parts[inner] = value if is_stateful(value) else Counts(value)
            parts |= _order_parts(inner, value, seen)
    return parts


def place_of(loader: DataLoader[Any]) -> str:
    """Return the name of the attribute of ``loader`` that has the sampler whose items are loaded as a batch."""
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def is_stateful(item: object) -> bool:
    """Return whether ``item`` has a state to commit."""
    return all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict"))


class OrderWatch:
    """Sees whether an iterator draws from the process's generators after its first item, in turn with the loop.

    Its draws then depend on those of the loop, which a resumed run does not repeat: a warning says so, once, and names
    ``owner``.
    """

    def __init__(self, owner: object) -> None:
        self._owner = type(owner).__name__
        self._is_warned = False

    def over(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield ``items``, and look."""
        last: list[Any] | None = None  # the states when the iterator gave its last item
        before = _drawn_states()
        for item in items:
            after = _drawn_states()
            if last is not None and not self._is_warned:
                states = zip(last, before, after, strict=True)
                self._is_warned = any(now != then != earlier for earlier, then, now in states)
                if self._is_warned:
                    _log.warning(
                        "%s draws from the process's random generators between batches, as the loop does: a run that"
                        " is resumed in the middle of an epoch may get other batches; expected a generator of its own,"
                        " as an attribute or in its state",
                        self._owner,
                    )
            yield item
            last, before = after, _drawn_states()


class DataWatch:
    """Stands in for two functions of ``loader``, and sees whether items or collator draw, in workers above all.

    The warning names who draws as ``whose``, and expects ``instead``.
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
        if self._worker_init_fn is not None:
            self._worker_init_fn(number)
        self.begin()

    def begin(self) -> None:
        """Look from now on at what this process draws."""
        self._before = _drawn_states(self._generators)

    def _collate(self, items: Any) -> Any:
        """Return the batch that the user's function makes of ``items``, drawn for by now."""
        batch = self._collate_fn(items)
        if not self._has_drawn:
            before = self._before
            self.begin()
            if before != self._before:
                self._has_drawn.fill_(True)
        return batch

    def warn(self) -> None:
        """Log, once, that random numbers were drawn, if they were."""
        if self._warning is not None and self._has_drawn:
            _log.warning(
                "%s draw random numbers: a run that is resumed in the middle of an epoch draws others from there on;"
                " expected %s",
                *self._warning,
            )
            self._warning = None

    def over(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield ``batches``, and warn."""
        for batch in batches:
            self.warn()
            yield batch


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
        of_ranks = getattr(self._sampler, "batch_sampler", self._sampler)  # accelerate's, over several
        innermost = getattr(of_ranks, "sampler", of_ranks)
        is_known = type(innermost).__module__.startswith(("torch.", "accelerate.", "transformers."))
        self._watch = None if is_known else OrderWatch(innermost)  # the known draw before their first item alone
        self._start: list[dict[str, Any]] = []  # the states when the sampler was made, and when it first drew
        self._pending: deque[dict[str, Any]] = deque()
        self._resumed: dict[str, Any] | None = None
        self.makes_here = loader.num_workers == 0
        self._data_watch: DataWatch | None = None
        if not self.makes_here:
            self._data_watch = DataWatch(loader, "worker processes of the DataLoader", "dataloader_num_workers=0")
        elif isinstance(loader.dataset, IterableDataset):
            self._data_watch = DataWatch(loader, "iterable data", "a data set with __getitem__")
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
            self._random.restore_order(resumed["start"][0])
        self._pending.clear()
        self._start = [self._random.states()]
        batches = iter(self._sampler)
        return self._indices(batches if self._watch is None else self._watch.over(batches), resumed)

    def _indices(self, batches: Iterator[Any], resumed: dict[str, Any] | None) -> Iterator[Any]:
        if resumed is not None and resumed["start"]:
            self._random.restore_order(resumed["start"][1])
        self._start.append(self._random.states())
        if resumed is not None:
            yield from itertools.islice(batches, resumed["position"])  # which accelerate skips
            for states, indices in zip(resumed["made"], batches, strict=False):
                self._random.restore_data(states)
                yield self._noted(indices)
            self._random.restore_data(resumed["then"])
        for indices in batches:
            yield self._noted(indices)

    def _noted(self, indices: Any) -> Any:
        """Return ``indices``, of a batch that is made next."""
        if self.makes_here:
            self._pending.append(self._random.states())
        if self._data_watch is not None:
            self._data_watch.begin()
        return indices

    def used(self, number: int) -> None:
        """The loop has taken ``number`` batches. Logs, once, draws that a resumed epoch does not have."""
        for _ in range(min(number, len(self._pending))):
            self._pending.popleft()
        if self._data_watch is not None:
            self._data_watch.warn()

    def state_dict(self) -> dict[str, Any]:
        """Return the states that a resumed run needs."""
        return {"start": self._start, "made": list(self._pending), "parts": self._random.part_states()}

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
        return self.makes_here and self._data_watch is None


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


def _set_states(parts: dict[str, Any], states: dict[str, Any]) -> None:
    for name in parts.keys() & states.keys():
        part, state = parts[name], states[name]
        writers = [write for kind, (_, write) in _GENERATORS.items() if isinstance(part, kind)]
        if writers:
            writers[0](part, state)
        else:
            part.load_state_dict(copy.deepcopy(state))
