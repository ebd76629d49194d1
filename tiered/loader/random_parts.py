"""The random states that decide which batches a loader gives: the process's, and those of the loader's own parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tiered.store.generations.registry import Stateful
from tiered.zero.model_state import RandomState

__all__ = ["Counts", "DrawWatch", "RandomParts", "drawn_states", "generators", "is_stateful", "parts_of"]

Item = TypeVar("Item")

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


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

    def count_on_from(self, other: RandomParts) -> None:
        """Take over the counts of ``other``, which knows the numbers from before the first pass."""
        self._parts |= {name: part for name, part in other._parts.items() if isinstance(part, Counts)}

    def states(self) -> dict[str, Any]:
        """Return copies of all states, of types that a commit can carry."""
        return {"process": RandomState().state_dict(), "parts": self.part_states()}

    def part_states(self) -> dict[str, Any]:
        """Return copies of the states of the parts alone."""
        return {name: _state(part) for name, part in self._parts.items()}

    def restore_parts(self, states: dict[str, Any]) -> None:
        """Set all parts to ``states``, as ``part_states`` returned them."""
        for name in self._parts.keys() & states.keys():
            _set_state(self._parts[name], states[name])

    def restart(self, start: dict[str, Any]) -> None:
        """Set everything but the kept parts to ``start``."""
        RandomState().load_state_dict(start["process"])
        self.restore_parts({name: state for name, state in start["parts"].items() if name not in self._kept})

    def restore_kept(self, states: dict[str, Any]) -> None:
        """Set the process's generators and the kept parts to ``states``."""
        RandomState().load_state_dict(states["process"])
        self.restore_parts({name: state for name, state in states["parts"].items() if name in self._kept})

    @contextmanager
    def replaying(self, start: dict[str, Any]) -> Iterator[None]:
        """Set everything but the kept parts to ``start``; at the end put the process's generators back."""
        found = RandomState().state_dict()
        try:
            self.restart(start)
            yield
        finally:
            RandomState().load_state_dict(found)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put everything back at the end."""
        found = self.states()
        try:
            yield
        finally:
            self.restore_parts(found["parts"])
            RandomState().load_state_dict(found["process"])


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
        parts |= {f"{name}.{key}": value for key, value in generators(owner).items()}
    if isinstance(loader.dataset, IterableDataset):
        parts["loader.dataset"] = Counts(loader.dataset)
    known = {id(part) for part in parts.values()}
    data_parts = {f"loader.dataset.{key}": value for key, value in generators(loader.dataset).items()}
    kept = () if loads_again else (name for name, part in data_parts.items() if id(part) not in known)
    return RandomParts(data_parts | parts, kept=frozenset(kept))


def generators(owner: object) -> dict[str, Any]:
    """Return the attributes of ``owner`` that are generators of random numbers."""
    attributes = getattr(owner, "__dict__", {})
    return {name: value for name, value in attributes.items() if isinstance(value, _GENERATORS)}


def is_stateful(item: object) -> TypeGuard[Stateful]:
    """Return whether ``item`` has a state to commit."""
    return all(callable(getattr(item, method, None)) for method in ("state_dict", "load_state_dict"))


class DrawWatch:
    """Sees whether an iterator draws from the process's generators after its first item, in turn with the loop.

    Its draws then depend on those of the loop, which a resumed run does not repeat. ``even_alone``: it
    counts although the loop draws nothing from the same generator.
    """

    def __init__(self, *, even_alone: bool = False) -> None:
        self.has_seen = False
        self._even_alone = even_alone
        self._last: list[Any] | None = None  # the states when the iterator gave its last item

    def begin(self) -> None:
        """Another iterator begins."""
        self._last = None

    def next(self, items: Iterator[Item]) -> Item:
        """Return the next item, and look."""
        if self.has_seen:
            return next(items)
        before = drawn_states()
        item = next(items)
        after = drawn_states()
        if self._last is not None:
            states = zip(self._last, before, after, strict=True)
            self.has_seen = any(now != then and (self._even_alone or then != last) for last, then, now in states)
        self._last = after
        return item


def drawn_states(parts: Iterable[Any] = ()) -> list[Any]:
    """Return the states of the process's generators and of ``parts``; they compare unequal once one was drawn from."""
    states = [torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate(), *map(_state, parts)]
    return [_comparable(state) for state in states]


def _comparable(state: Any) -> Any:
    """Return ``state`` with the bytes of tensors and arrays in their place."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return np.asarray(state).tobytes() if isinstance(state, torch.Tensor | np.ndarray) else state


def _state(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return copy.deepcopy(part.bit_generator.state)
    if isinstance(part, np.random.RandomState):
        return part.get_state(legacy=False)
    if isinstance(part, random.Random):
        return part.getstate()
    return copy.deepcopy(part.state_dict())


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = state
    elif isinstance(part, np.random.RandomState):
        part.set_state(state)
    elif isinstance(part, random.Random):
        part.setstate(state)
    else:
        part.load_state_dict(copy.deepcopy(state))
