"""Cache: keys under a prefix that together never take more of the drives than a capacity; the least used ones go.

The bytes are counted in the store's table of keys whenever they might be too many, so that no way by which a key comes
or goes can be forgotten.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

import torch

from tiered.errors import CapacityError, LeaseError
from tiered.store.residency.entry import new_version
from tiered.store.residency.residency import Residency
from tiered.units import format_bytes

__all__ = ["Cache", "CacheStore"]

_ORDER = "$order"
_SLACK = 16  # a sixteenth of the capacity is made free at once: each time costs a look at all keys, perhaps a commit


class CacheStore(Protocol):
    """The store that a cache is in, as the cache uses it."""

    working_set: Residency

    @property
    def has_registered(self) -> bool: ...
    @property
    def is_read_only(self) -> bool: ...
    def __getitem__(self, key: str) -> torch.Tensor: ...
    def __setitem__(self, key: str, value: torch.Tensor) -> None: ...
    def __delitem__(self, key: str) -> None: ...
    def __contains__(self, key: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def commit(self) -> int: ...
    def add_guard(self, guard: Callable[[str], None]) -> None: ...


class Cache(MutableMapping[str, torch.Tensor]):
    """The tensors of the store whose keys begin with ``prefix``, by the rest of their keys; made by ``Store.cache``.

    The invariant: *the bytes that they take, in the open generation and in the committed one, are at most*
    ``capacity``. A put that finds no room drops the tensors whose last put or get is longest ago. The bytes of a
    committed one are free with the next commit; so where these are needed, the put commits, as ``store.commit()`` does,
    with the last state. In a store where anything is registered, such as a model, it raises CapacityError instead:
    commit there. The order of use is part of every commit. A key that is used through the store itself changes no
    order, and is counted at the next put. All methods are thread-safe and block.
    """

    def __init__(self, store: CacheStore, prefix: str, capacity: int) -> None:
        self.prefix, self.capacity = prefix, capacity
        self._store = store
        self._lock = threading.RLock()  # guards all below, and one put at a time
        self._order: OrderedDict[str, None] = OrderedDict()  # names, least recently used first
        self._most_nbytes = capacity  # they take no more than that, as long as nobody else changes a key
        self._version = 0  # of the store's keys, after the last put
        self._is_changed = False  # the order, since it was last put
        if prefix + _ORDER in store:
            names = json.loads(bytes(store[prefix + _ORDER].tolist()))
            self._order = OrderedDict.fromkeys(name for name in names if prefix + name in store)
        self._add_others()
        store.add_guard(self._put_order)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a copy of the tensor of ``name``, which is the most recently used one then. KeyError."""
        if not isinstance(name, str):
            raise KeyError(f"expected a str as the name, got {type(name).__name__}")
        value = self._store[self._key(name)]
        self._use(name)
        return value

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Make a copy of ``value`` the tensor of ``name``. Raises CapacityError for one above the capacity."""
        key = self._key(name)
        nbytes = self._nbytes(value.nbytes if isinstance(value, torch.Tensor) else 0)
        with self._lock:
            if nbytes + 2 * self._nbytes(len(_encoded([name]))) > self.capacity:
                raise CapacityError(
                    f"cache {self.prefix!r}: {name!r} takes {format_bytes(nbytes)}, the capacity is"
                    f" {format_bytes(self.capacity)}; give a larger capacity="
                )
            self._make_room(name, nbytes)
            self._most_nbytes += nbytes
            self._store[key] = value
            self._use(name)
            self._version = new_version()

    def __delitem__(self, name: str) -> None:
        """Drop ``name``. KeyError; LeaseError while it is leased for writing."""
        with self._lock:
            if name not in self:
                raise KeyError(name)
            del self._store[self._key(name)]
            self._order.pop(name, None)
            self._is_changed = True

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name != _ORDER and self.prefix + name in self._store

    def __iter__(self) -> Iterator[str]:
        """Iterate over a snapshot of the names, in the order in which they were made."""
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    @property
    def nbytes(self) -> int:
        """The bytes that the keys take of the drives now, in both generations."""
        return self._store.working_set.taken_by_keys(self.prefix)[0]

    def _key(self, name: str) -> str:
        if not isinstance(name, str):
            raise TypeError(f"cache {self.prefix!r}: expected a str as the name, got {type(name).__name__}")
        if name == _ORDER:
            raise KeyError(f"{name!r} is where the order of use is kept")
        return self.prefix + name

    def _names(self) -> list[str]:
        start = len(self.prefix)
        return [key[start:] for key in self._store if key.startswith(self.prefix) and key[start:] != _ORDER]

    def _use(self, name: str) -> None:
        with self._lock:
            self._order[name] = None
            self._order.move_to_end(name)
            self._is_changed = True

    def _nbytes(self, nbytes: int) -> int:
        """Return what a tensor of ``nbytes`` takes, in one generation."""
        return self._store.working_set.space.round_up(nbytes)

    def _order_nbytes(self, name: str = "") -> int:
        """Return what the order, with ``name``, may take in two generations."""
        return 2 * self._nbytes(len(_encoded([*self._order, name])) if self._order else 4096)

    def _add_others(self) -> None:
        """Take names that came by other ways for the least recently used ones; forget those that have gone."""
        names = dict.fromkeys(self._names())
        for name in [name for name in self._order if name not in names]:
            del self._order[name]
        for name in reversed([name for name in names if name not in self._order]):
            self._order[name] = None
            self._order.move_to_end(name, last=False)

    def _make_room(self, name: str, nbytes: int) -> None:
        """Have ``nbytes`` free of the capacity for ``name``; drop others and commit where that must be."""
        is_known = new_version() == self._version + 1  # no key has changed since
        if is_known and self._most_nbytes + nbytes + self._order_nbytes(name) <= self.capacity:
            return
        self._add_others()
        taken, left = self._taken()
        if taken + nbytes + self._order_nbytes(name) > self.capacity:
            goal = self.capacity - self.capacity // _SLACK - nbytes
            order = len(_encoded([*self._order, name]))
            for other in [each for each in self._order if each != name]:
                if left + 2 * self._nbytes(order) <= goal:
                    break
                left -= self._drop(other)
                order -= len(_encoded([other])) - 1
            taken, left = self._taken()
        missing = taken + nbytes + self._order_nbytes(name) - self.capacity
        if missing > 0 and left < taken:
            self._commit(missing)
            taken, _ = self._taken()
            missing = taken + nbytes + self._order_nbytes(name) - self.capacity
        if missing > 0:
            raise CapacityError(
                f"cache {self.prefix!r}: {format_bytes(nbytes)} are needed for {name!r}, {format_bytes(taken)} of"
                f" {format_bytes(self.capacity)} are taken by keys that are leased or being committed; release leases,"
                " or try again"
            )
        self._most_nbytes = taken

    def _taken(self) -> tuple[int, int]:
        """Return what the keys but the order take, and what they will take after a commit."""
        order = self._store.working_set.taken_by_keys(self.prefix + _ORDER)
        every = self._store.working_set.taken_by_keys(self.prefix)
        return every[0] - order[0], every[1] - order[1]

    def _drop(self, name: str) -> int:
        """Drop ``name`` unless it is leased for writing; return what that frees with the next commit."""
        freed = self._store.working_set.taken_by_key(self.prefix + name)
        try:
            del self._store[self.prefix + name]
        except LeaseError:
            return 0
        self._order.pop(name, None)
        return freed

    def _commit(self, missing: int) -> None:
        if self._store.has_registered:
            raise CapacityError(
                f"cache {self.prefix!r}: {format_bytes(missing)} more are free with the next commit, which belongs to"
                " what is registered with the store; call store.commit(), then put again"
            )
        self._store.commit()

    def _put_order(self, word: str) -> None:
        """Have the order in the commit that is about to come; a guard of the store."""
        with self._lock:
            if word not in ("commit", "close"):
                self._is_changed = True  # a rollback takes back the order, too, that was put last
                return
            if self._is_changed and not self._store.is_read_only:
                self._add_others()
                encoded = _encoded(self._order)
                self._store[self.prefix + _ORDER] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
                self._is_changed = False

    def __repr__(self) -> str:
        of = f"{format_bytes(self.nbytes)} of {format_bytes(self.capacity)}"
        return f"<Cache {self.prefix!r}: {len(self)} keys, {of}>"


def _encoded(names: Any) -> bytes:
    return json.dumps(list(names), separators=(",", ":")).encode()
