"""snapshot: values as they are at one moment, to be built afresh later: containers, plain objects, generators.

A list that has grown since, a key-value cache that was written to or a generator that has drawn is as it was.
"""

from __future__ import annotations

import abc
import array
import collections
import contextlib
import copy
import enum
import functools
import io
import logging
import pathlib
import random
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Snapshot", "build", "is_constant", "version_of"]

_PLAIN: frozenset[type] = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Size})
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, nn.Module, nn.Parameter)
_OF_PYTHON = (range, slice, enum.Enum, pathlib.PurePath, logging.Logger, weakref.ref, type, types.ModuleType)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_CONSTANTS = (*_PLAIN, *_OF_TORCH, *_OF_PYTHON, *_FUNCTIONS, types.EllipsisType, np.generic, np.dtype)
"""What no forward changes, or what is looked after elsewhere: modules and their parameters."""

_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
_ARRAYS = (np.ndarray, array.array, bytearray)
_OF_THE_PROCESS = (torch.default_generator, np.random.mtrand._rand, random._inst)
"""The generators that RandomStates looks after."""

_CONTAINERS = (collections.OrderedDict, collections.defaultdict, dict, list, collections.deque)

_MOST_VALUES = 4096
_MOST_LEVELS = 64
_MOST_NBYTES = 1 << 20  # of one array
"""Of one snapshot: what holds more is somebody's data, which is not copied for each forward."""


def is_constant(value: Any) -> bool:
    """Return whether ``value`` stays as it is as long as it is the same object."""
    if type(value) in _PLAIN or isinstance(value, _CONSTANTS):
        return True
    is_small_tuple = isinstance(value, tuple | frozenset) and len(value) <= _MOST_VALUES
    return is_small_tuple and all(map(is_constant, value))


def version_of(tensor: torch.Tensor) -> int:
    """Return the count of writes in place to ``tensor``; 0 where torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


class Snapshot:
    """Some values as they are when they are taken; ``build`` makes them afresh, one object where there was one.

    It refers to no container and no object of the caller's: one may come to hold what the forward computes, which would
    keep itself alive. Tensors are not copied but listed, each once, and given to ``build`` in their order; constants
    and what cannot be copied stand for themselves. ``unknown`` tells the first of the latter: where, and its type;
    ``iterator`` the first that each use changes.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.places: list[str] = []  # where each tensor was found first
        self.unknown = ""
        self.iterator = ""
        self._place = ""
        self._taken: dict[int, Any] = {}
        self._alive: list[Any] = []  # what ``_taken`` knows by its address
        self._num_levels = 0

    def take(self, value: Any, place: str) -> Any:
        """Return what ``build`` is to make ``value`` from; ``place`` is what messages call it."""
        self._place = place
        return self._take(value)

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is not torch.Tensor and isinstance(value, _CONSTANTS)):
            return value
        if id(value) not in self._taken:
            self._alive.append(value)
            self._num_levels += 1
            self._taken[id(value)] = self._take_new(value)
            self._num_levels -= 1
        return self._taken[id(value)]

    def _take_new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.places.append(self._place)
            return _Place(len(self.tensors) - 1)
        if isinstance(value, _GENERATORS) and value not in _OF_THE_PROCESS:
            with contextlib.suppress(NotImplementedError):  # the system's generator has no state
                return _Copied(_copy_of(value))
        if isinstance(value, _ARRAYS) and _is_small(value):
            return _Copied(_copy_of(value))
        if self._is_too_much(value) or not (isinstance(value, tuple | set) or _can_be_copied(value)):
            return self._leave(value)
        if isinstance(value, set):
            return _Set(type(value), tuple(value))
        if isinstance(value, tuple):
            items = [self._take(item) for item in value]
            return value if all(map(_is, items, value)) else _Tuple(type(value), items)
        return self._take_object(value)

    def _leave(self, value: Any) -> Any:
        what = f"{self._place}, of type {type(value).__name__}"
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            self.iterator = self.iterator or what
        if not isinstance(value, (frozenset, *_GENERATORS)) and not callable(value):
            self.unknown = self.unknown or what
        return value

    def _is_too_much(self, value: Any) -> bool:
        is_container = isinstance(value, (tuple, set, *_CONTAINERS))
        num_more = len(value) if is_container else 0
        return len(self._alive) > _MOST_VALUES or num_more > _MOST_VALUES or self._num_levels > _MOST_LEVELS

    def _take_object(self, value: Any) -> _Object:
        taken = self._taken[id(value)] = _Object(type(value))  # Order: what is in it may refer to it
        if isinstance(value, dict):
            pairs = collections.OrderedDict.items(value) if isinstance(value, _CONTAINERS[0]) else dict.items(value)
            taken.items = [(key, self._take(item)) for key, item in list(pairs)]  # another thread may add to it
        elif isinstance(value, _CONTAINERS):
            taken.items = [self._take(item) for item in list(value)]
        if isinstance(value, collections.deque):
            taken.option = value.maxlen
        elif isinstance(value, collections.defaultdict):
            taken.option = value.default_factory
        taken.attributes = {name: self._take(item) for name, item in dict(getattr(value, "__dict__", {})).items()}
        taken.slots = {name: self._take(getattr(value, name)) for name in _slots(type(value)) if hasattr(value, name)}
        if not isinstance(value, _CONTAINERS) and all(map(is_constant, _values(taken))):
            with contextlib.suppress(TypeError):  # of a class that has no room for one
                taken.original = weakref.ref(value)
        return taken


def build(taken: Any, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Any:
    """Make afresh what ``Snapshot.take`` returned ``taken`` for; ``built``: what was made of the snapshot so far."""
    if not isinstance(taken, _Taken):
        return taken
    if id(taken) not in built:
        taken.build(tensors, built)
    return built[id(taken)]


class _Taken(abc.ABC):
    """What a value is made afresh from."""

    __slots__ = ()

    @abc.abstractmethod
    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        """Make it and note it in ``built``."""


class _Place(_Taken):
    """A tensor, by its place in the list."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        built[id(self)] = tensors[self.index]


class _Tuple(_Taken):
    """A tuple, named or not."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        built[id(self)] = tuple.__new__(self.kind, [build(item, tensors, built) for item in self.items])


class _Set(_Taken):
    """A set, whose members stand for themselves."""

    __slots__ = ("kind", "members")

    def __init__(self, kind: type, members: tuple[Any, ...]) -> None:
        self.kind = kind
        self.members = members

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        built[id(self)] = self.kind(self.members)


class _Copied(_Taken):
    """An array, or a random number generator in a state that nobody else advances."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        built[id(self)] = _copy_of(self.value)


class _Object(_Taken):
    """A dict, list or deque, or an object of a class written in Python, which both may be.

    One that holds constants only is itself again as long as it holds them: it may be one of those that are compared by
    identity, such as the mark for an argument that was not given.
    """

    __slots__ = ("attributes", "items", "kind", "option", "original", "slots")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.items: list[Any] = []
        self.option: Any = None
        self.attributes: dict[str, Any] = {}
        self.slots: dict[str, Any] = {}
        self.original: weakref.ref[Any] | None = None

    def build(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> None:
        original = None if self.original is None else self.original()
        if original is not None and self._is_held_by(original):
            built[id(self)] = original
            return
        base: Any = next(
            (base for base in (*_CONTAINERS, types.SimpleNamespace) if issubclass(self.kind, base)), object
        )
        made: Any = base.__new__(self.kind)
        built[id(self)] = made  # Order: what is in it may refer to it
        if base is collections.defaultdict:
            made.default_factory = self.option
        elif base is collections.deque:
            collections.deque.__init__(made, (), self.option)
        if issubclass(base, dict):
            for key, item in self.items:
                base.__setitem__(made, key, build(item, tensors, built))
        elif issubclass(base, list | collections.deque):
            base.extend(made, [build(item, tensors, built) for item in self.items])
        if self.attributes:
            made.__dict__.update({name: build(item, tensors, built) for name, item in self.attributes.items()})
        for name, item in self.slots.items():
            object.__setattr__(made, name, build(item, tensors, built))

    def _is_held_by(self, value: Any) -> bool:
        """Return whether ``value`` still has these attributes and slots."""
        own = getattr(value, "__dict__", {})
        is_same = own.keys() == self.attributes.keys() and all(own[name] is self.attributes[name] for name in own)
        return is_same and all(getattr(value, name, self) is item for name, item in self.slots.items())


def _values(taken: _Object) -> list[Any]:
    return [*taken.attributes.values(), *taken.slots.values()]


def _is(left: Any, right: Any) -> bool:
    return left is right


def _can_be_copied(value: Any) -> bool:
    """Return whether ``value`` is a container or an object of a class that leaves copying, and its end, to python."""
    kind = type(value)
    if hasattr(kind, "__del__"):
        return False
    if isinstance(value, (*_CONTAINERS, types.SimpleNamespace)):
        return True
    if any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce_ex__", "__reduce__")):
        return False
    if hasattr(kind, "__next__") or not (hasattr(value, "__dict__") or _slots(kind)):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # written in C, or abstract
        return False
    return True


def _slots(kind: type) -> list[str]:
    """Return the names of the slots of a class's objects, as python knows them."""
    found = []
    for cls in kind.__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                found.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return found


def _is_small(value: Any) -> bool:
    """Return whether an array is one of numbers, and few."""
    if isinstance(value, np.ndarray):
        return value.nbytes <= _MOST_NBYTES and not value.dtype.hasobject
    return memoryview(value).nbytes <= _MOST_NBYTES


def _copy_of(value: Any) -> Any:
    if not isinstance(value, torch.Generator):
        return copy.deepcopy(value)
    made = torch.Generator(value.device)
    made.set_state(value.get_state())
    return made
