"""construct: run a model's ordinary constructor with its parameters going into the store as they are made.

Each parameter becomes a key of its own, faulting in for reading and writing while the constructor initialises it. So a
model larger than memory gets exactly the weights, and uses exactly the random numbers, of the ordinary constructor.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.bytes.interrupt import uninterrupted, uninterrupted_block
from tiered.errors import UsageError
from tiered.store.residency.working_set import Lease
from tiered.store.store import Store
from tiered.zero.frames import num_on_stack
from tiered.zero.parameters.functorch import guard_functorch
from tiered.zero.parameters.parameter import TieredParameter, name_of, without_dispatch
from tiered.zero.parameters.placeholder import placeholder
from tiered.zero.parameters.unit import Segment

__all__ = ["ConstructedParameter", "construct"]

_numbers = itertools.count()
_CPU = torch.device("cpu")


class ConstructedParameter:
    """One parameter between its constructor and ``shard``: a scratch key of its own, leased while it is used.

    This object takes the place of the unit and the owner that a sharded parameter has.
    """

    def __init__(self, construction: _Construction, segment: Segment) -> None:
        self.owner = construction
        self.key = f"construct/{next(_numbers)}"
        self.segment = segment
        self.lease: Lease | None = None
        self.num_ops = 0
        self.origin: weakref.ref[nn.Parameter] | None = None  # the parameter that nn.Parameter() made this one of
        segment.unit = self  # type: ignore[assignment]

    def describe(self) -> str:
        """Return the state in words, for messages."""
        return "under construction" if self.owner.is_open else "constructed, not sharded"

    def show(self) -> None:
        """Lease the bytes and make the parameter a view of them."""
        if self.lease is None:
            self.lease = self.owner.store.working_set.lease(self.key, "rw")
            self.owner.shown[self] = None
            with without_dispatch():
                self.segment.parameter.data = self.segment.view(self.lease.tensor)

    def park(self) -> None:
        """Give the lease back; tensors that still look at the bytes keep them."""
        if self.lease is not None:
            lease, self.lease = self.lease, None
            self.owner.shown.pop(self, None)
            with without_dispatch():
                self.segment.parameter.data = placeholder(self.segment.shape, self.segment.dtype, _CPU)
            lease.release()


class _Construction:
    """One ``with construct(store):`` block: takes every parameter that is registered on a module."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_open = True
        self.shown: dict[ConstructedParameter, None] = {}  # oldest first
        store.working_set.add_reclaimer(self._reclaim)

    @uninterrupted
    def take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Move ``parameter``, which ``module`` registers as ``name``, into the store; same object, same values."""
        if (
            type(parameter) is not nn.Parameter
            or parameter.device.type != "cpu"
            or parameter.layout is not torch.strided
        ):
            return None  # tied (ours already), on meta, or another subclass
        self._place(f"{type(module).__name__}.{name}", parameter)
        parameter.__class__ = TieredParameter
        return None

    @uninterrupted
    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """``parameter.data = value`` in a constructor: another key, of the value's shape, strides and dtype."""
        old: Any = segment.unit
        storage = value.untyped_storage().data_ptr()
        for other in self.shown:
            lease = other.lease
            if other is not old and lease is not None and lease.tensor.untyped_storage().data_ptr() == storage:
                raise UsageError(
                    f"parameter {segment.name}: .data of {other.segment.name}, to share its memory; expected one"
                    " parameter that both modules name, as in head.weight = emb.weight, or .data.clone(); where it is"
                    " somebody else's code that does so (resize_token_embeddings of transformers), call it on a model"
                    " built outside `with tiered.construct(store):`, before tiered.shard"
                )
        lease, old.lease = old.lease, None
        self.shown.pop(old)
        segment.parameter.data = value
        self._place(segment.name, segment.parameter)
        lease.release()
        self.store.working_set.delete([old.key])

    @uninterrupted
    def copy(self, segment: Segment) -> nn.Parameter:
        """``copy.deepcopy`` of a parameter in a constructor (TransformerEncoder's): another one, of equal values."""
        with self.access(segment, "deepcopy", (), {}), without_dispatch():
            copied = nn.Parameter(segment.parameter.detach().clone(), segment.parameter.requires_grad)
            self._place(segment.name, copied)
        copied.__class__ = TieredParameter
        return copied

    def detached(self, segment: Segment, result: torch.Tensor) -> torch.Tensor:
        """``parameter.detach()``: for ``nn.Parameter(parameter)``, which parametrizations call, another parameter.

        It has equal values, not the same memory; ``shard`` refuses both in one model.
        """
        if num_on_stack(nn.Parameter.__new__.__code__) == 0:
            return result
        copied = self.copy(segment)
        constructed: Any = copied.segment.unit  # type: ignore[attr-defined]
        constructed.origin = weakref.ref(segment.parameter)
        return copied

    def set(self, segment: Segment, source: torch.Tensor) -> None:
        """``parameter.set_(source)`` in a constructor (parametrizations'): as ``parameter.data = source``."""
        segment.parameter.data = source

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Give ``parameter``, an ordinary tensor now, a key of its own, and show it there with the same values."""
        segment = Segment(name, parameter, parameter.dtype)
        constructed = ConstructedParameter(self, segment)
        working_set = self.store.working_set
        working_set.create(constructed.key, max(segment.nbytes, 1), scratch=True)
        lease = working_set.lease(constructed.key, "w")
        constructed.lease = lease
        self.shown[constructed] = None
        view = segment.view(lease.tensor)
        with torch.no_grad():
            view.copy_(parameter)
            parameter.data = view
        parameter.segment = segment  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def access(self, segment: Segment, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Show the parameter for one operation, which may write it."""
        if not self.is_open:
            raise UsageError(
                f"parameter {segment.name}: {name_of(func)} after `with tiered.construct(store):`; expected it inside"
                " of that block, or tiered.shard(model, store) first"
            )
        constructed: Any = segment.unit
        constructed.show()
        constructed.num_ops += 1
        try:
            yield
        finally:
            constructed.num_ops -= 1

    def is_unsharded(self, segment: Segment) -> bool:
        """Return False: the parameter may be parked at any time."""
        return False

    def require_gradient(self, parameter: nn.Parameter) -> None:
        """Nothing to follow: gradients come after ``shard``."""

    def park_all(self) -> None:
        """Give every lease back."""
        for constructed in list(self.shown):
            constructed.park()

    def _reclaim(self, nbytes: int) -> bool:
        for constructed in list(self.shown):
            if constructed.num_ops == 0:
                constructed.park()
                return True
        return False


@uninterrupted_block
def construct(store: Store) -> Iterator[None]:
    """Build a model whose parameters live in ``store`` from the moment they are made.

    ``with tiered.construct(store): model = GPT(...)``, then ``tiered.shard(model, store)``. The constructor runs as it
    is; parameters may be read and written inside the block, in DRAM bounded by the store's budget. Parameters on the
    meta device and tensors that are not parameters stay as they are. Not thread-safe. Raises CapacityError when one
    parameter is larger than the budget.
    """
    guard_functorch()
    construction = _Construction(store)
    hook = register_module_parameter_registration_hook(construction.take)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
        construction.park_all()
        construction.is_open = False
