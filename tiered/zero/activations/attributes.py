"""attributes: what modules keep in plain attributes, as it is at one moment, and put in its place again for a while."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiered.zero.activations.snapshot import Snapshot, build, is_constant, version_of

__all__ = ["Attributes"]

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


Known = Sequence[dict[str, Any] | None]
"""By module, its attributes where all of them are constants, which need no second look as long as they are the same."""


class Attributes:
    """The attributes of ``modules`` (by name) as they are when this is made, the mode of training included.

    Numbers, containers, plain objects and generators can be had back; a tensor that was written in place cannot. They
    are taken into ``snapshot`` after what is in it, with which they may share objects.
    """

    def __init__(self, modules: Mapping[str, nn.Module], known: Known, snapshot: Snapshot) -> None:
        self.known: list[dict[str, Any] | None] = []
        self._modules = list(modules.values())
        self._taken: list[dict[str, Any]] = []  # by module, where there are others than constants
        num_before = len(snapshot.tensors)
        for (where, module), constant in zip(modules.items(), known, strict=True):
            taken: dict[str, Any] = {}
            if constant is None or not _is_same(vars(module), constant):
                own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
                constant = dict(vars(module)) if all(map(is_constant, own.values())) else None
                if constant is None:
                    taken = {name: snapshot.take(value, f"{where}.{name}") for name, value in own.items()}
            self.known.append(constant)
            self._taken.append(taken)
        self._places = snapshot.places[num_before:]
        self._tensors = [_without_graph(tensor) for tensor in snapshot.tensors[num_before:]]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def written(self) -> str:
        """Return the name of the first tensor that was written in place since; "" if none was."""
        for tensor, version, place in zip(self._tensors, self._versions, self._places, strict=True):
            if version_of(tensor) != version:
                return place
        return ""

    @contextmanager
    def in_place(self, tensors: Sequence[torch.Tensor], built: dict[int, Any]) -> Iterator[None]:
        """Inside, the modules have these attributes; after it those that they have now.

        ``tensors`` and ``built``: those of what the snapshot held before.
        """
        present = [dict(vars(module)) for module in self._modules]
        tensors = [*tensors, *self._tensors]
        try:
            for module, constant, taken in zip(self._modules, self.known, self._taken, strict=True):
                if constant is None:
                    _put(module, {name: build(value, tensors, built) for name, value in taken.items()})
                elif not _is_same(vars(module), constant):
                    _put(module, constant)
            yield
        finally:
            for module, own in zip(self._modules, present, strict=True):
                if not _is_same(vars(module), own):
                    _put(module, own)


def _is_same(own: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether both have the same names in one order, and the very same values."""
    return list(own) == list(other) and all(map(operator.is_, own.values(), other.values()))


def _put(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give ``module`` these attributes and no others, but for what every module has."""
    own = vars(module)
    for name in own.keys() - attributes.keys() - _OF_EVERY_MODULE:
        del own[name]
    for name, value in attributes.items():
        if name not in _OF_EVERY_MODULE:
            own[name] = value


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or one with its bytes and no graph: a graph kept here could keep the one before, and so on."""
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
