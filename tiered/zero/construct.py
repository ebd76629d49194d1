"""construct: run a model's ordinary constructor with its parameters going into the store as they are made.

Each parameter becomes a key of its own, faulting in for reading and writing while the constructor initialises it. So a
model larger than memory gets exactly the weights, and uses exactly the random numbers, of the ordinary constructor.

Over ranks each runs the whole constructor, and keeps its N-th of the bytes of every parameter. All bring one together
that was parked. So which are parked, and when, follows from the program alone: the oldest beyond a part of the budget.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.bytes.host_tensor import storage_address
from tiered.errors import UsageError
from tiered.ranks.comm import NullComm
from tiered.store.store import Store
from tiered.tiers.compute_tier import Collectives, ComputeTier, Gathered
from tiered.zero.compute_device import give_construction_memory, named_device, tier_of
from tiered.zero.parameters.module_calls import num_on_stack
from tiered.zero.parameters.parameter import TieredParameter, name_of, without_dispatch
from tiered.zero.parameters.tensor_without_bytes import placeholder
from tiered.zero.parameters.unit import Segment, digest
from tiered.zero.parameters.unit_collectives import GatheredByAll, UnitCollectives
from tiered.zero.torch_func_guard import guard_functorch

__all__ = ["ConstructedParameter", "construct"]

_SHOWN_PART = 4  # of the budget: a quarter has the parameters that are shown, over ranks

_numbers: weakref.WeakKeyDictionary[Store, Iterator[int]] = weakref.WeakKeyDictionary()  # over ranks keys are equal


class ConstructedParameter:
    """One parameter between its constructor and ``shard``: a scratch key of its own, leased while it is used.

    This object takes the place of the unit and the owner that a sharded parameter has.
    """

    def __init__(self, construction: _Construction, segment: Segment) -> None:
        self.owner = construction
        self.key = f"construct/{next(_numbers.setdefault(construction.store, itertools.count()))}"
        self.segment = segment
        self.digest = 0  # over ranks: of the values as this one has made them, when they were parked
        self._found = 0  # the digest of the bytes themselves
        self._mixed = -1, 0  # that of pieces of other values, brought together; and this rank's ``digest`` before
        self.gathered: Gathered | None = None
        self.tier = construction.tier_of(segment.parameter.device)
        self.comm: Collectives = construction.comm if self.tier.computes_in_dram else NullComm()  # whole on a device
        self.num_ops = 0
        self.origin: weakref.ref[nn.Parameter] | None = None  # the parameter that nn.Parameter() made this one of
        segment.unit = self  # type: ignore[assignment]

    def describe(self) -> str:
        """Return the state in words, for messages."""
        return "under construction" if self.owner.is_open else "constructed, not sharded"

    def show(self) -> None:
        """Lease the bytes and make the parameter a view of them, on its device."""
        if self.gathered is None:
            view = self.gather("rw")
            with without_dispatch():
                self.segment.parameter.data = view

    def gather(self, mode: str) -> torch.Tensor:
        """Lease the bytes for ``mode``, and return them with the parameter's shape, on its device."""
        give_construction_memory(self.tier, self.segment.nbytes)
        self.owner.make_room(self.segment.nbytes)
        self.gathered = self._gather(mode)
        self.gathered.use()
        self.owner.shown[self] = None
        self.owner.shown_nbytes += self.segment.nbytes
        return self.segment.view(self.gathered.whole[0])

    def _gather(self, mode: str) -> Gathered:
        comm = self.comm
        if not isinstance(comm, UnitCollectives) or mode == "w":
            return comm.gather(self.tier, [self.key], mode)
        drawn = digest(torch.get_rng_state()) if self.owner.is_open else 0
        self.join()
        comm.use, comm.payload = self.segment.name, drawn.to_bytes(8, "little") + self.digest.to_bytes(8, "little")
        gathered = comm.gather(self.tier, [self.key], mode)
        if len({told[:8] for told in comm.told}) > 1:
            gathered.release(())
            raise UsageError(
                f"tiered.construct: the ranks have drawn other random numbers up to {self.segment.name}; expected the"
                " same on all: torch.manual_seed(0) before the model is built"
            )
        if len(set(comm.told)) > 1:  # by right until they are initialised: else ``shard`` refuses them
            self._mixed = digest(gathered.whole[0][: self.segment.nbytes]), self.digest
        return gathered

    def _was_written(self, whole: torch.Tensor) -> bool:
        """Return whether the bytes are others than at the last call."""
        before, self._found = self._found, digest(whole[: self.segment.nbytes])
        self.digest = self._mixed[1] if self._found == self._mixed[0] else self._found
        return self._found != before

    def join(self) -> None:
        """Over ranks: have what tensors on the parked bytes wrote, such as one of ``.data`` that was kept."""
        if (gathered := self.owner.seen.pop(self, None)) is not None:
            assert isinstance(self.comm, UnitCollectives)
            gathered.look(self.comm)
            if self._was_written(gathered.whole[0]):
                gathered.write_back()
            gathered.release(())

    @property
    def is_divided(self) -> bool:
        """Whether each rank has a piece of the bytes; then all lend the values together."""
        return self.comm.world > 1

    @contextlib.contextmanager
    def lend(self, mode: str) -> Iterator[torch.Tensor]:
        """Lend the values to ``mode``, in DRAM, of the parameter's shape; no tensor of them may outlive the block.

        ``mode`` is "r" where they are divided.
        """
        self.park()
        if self.is_divided:
            gathered = self._gather(mode)
            try:
                yield self.segment.view(gathered.whole[0])
            finally:
                gathered.release(())
            return
        lease = self.tier.lease(self.key, mode)
        try:
            yield self.segment.view(lease.tensor)
        finally:
            lease.release()

    def lies_in(self, storage: int) -> bool:
        """Return whether the parameter, or a tensor of its ``.data``, is shown in the storage of that address."""
        if self in self.owner.seen:
            return self.owner.seen[self].lies_in(storage)
        return self.gathered is not None and self.gathered.whole[0].untyped_storage().data_ptr() == storage

    def park(self) -> None:
        """Give the lease back; tensors that still look at the bytes keep them."""
        if self.gathered is not None:
            gathered = self.take()
            gathered.use()
            if self.is_divided:
                self._was_written(gathered.whole[0])
            gathered.write_back()
            with without_dispatch():
                self.segment.parameter.data = placeholder(self.segment.shape, self.segment.dtype, self.tier.device)
            if isinstance(gathered, GatheredByAll) and self.owner.is_open and gathered.is_seen():
                self.owner.seen[self] = gathered
            else:
                gathered.release(())

    def take(self) -> Gathered:
        """Return the lease, which is the caller's now: the parameter is not shown any more."""
        gathered, self.gathered = self.gathered, None
        assert gathered is not None
        self.owner.shown.pop(self, None)
        self.owner.shown_nbytes -= self.segment.nbytes
        return gathered


class _Construction:
    """One ``with construct(store):`` block: moves every parameter in that is registered on a module."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_open = True
        self.shown: dict[ConstructedParameter, None] = {}  # oldest first
        self.shown_nbytes = 0
        self.seen: dict[ConstructedParameter, GatheredByAll] = {}  # parked ones that tensors of the constructor's show
        in_dram = ComputeTier(store.working_set)
        self.comm = NullComm() if store.ranks is None else UnitCollectives(store.ranks, store.working_set, in_dram)
        self._tiers: dict[torch.device, ComputeTier] = {}
        store.working_set.add_reclaimer(self._reclaim)

    def move_in(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Move ``parameter``, which ``module`` registers as ``name``, into the store; same object, same values."""
        with self.store.working_set.mark:
            if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided:
                return None  # tied (ours already), on meta, or another subclass
            self._place(f"{type(module).__name__}.{name}", parameter)
            parameter.__class__ = TieredParameter
            return None

    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """``parameter.data = value`` in a constructor: another key, of the value's shape, strides and dtype."""
        with self.store.working_set.mark:
            old: Any = segment.unit
            storage = storage_address(value)
            for other in (*self.shown, *self.seen):
                if other is not old and other.lies_in(storage):
                    raise UsageError(
                        f"parameter {segment.name}: .data of {other.segment.name}, to share its memory; expected one"
                        " parameter that both modules name, as in head.weight = emb.weight, or .data.clone(); where it"
                        " is somebody else's code that does so (resize_token_embeddings of transformers), call it on a"
                        " model built outside `with tiered.construct(store):`, before tiered.shard"
                    )
            gathered = old.take()
            segment.parameter.data = value
            self._place(segment.name, segment.parameter)
            gathered.release(())
            self.store.working_set.delete([old.key])

    def copy(self, segment: Segment) -> nn.Parameter:
        """``copy.deepcopy`` of a parameter in a constructor (TransformerEncoder's): another one, of equal values."""
        with self.store.working_set.mark:
            with self.access([segment], "deepcopy", (), {}), without_dispatch():
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
        working_set.create(constructed.key, max(-(-segment.nbytes // constructed.comm.world), 1), scratch=True)
        view = constructed.gather("w")
        with torch.no_grad():
            view.copy_(parameter)
            parameter.data = view
        parameter.segment = segment  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def access(
        self, segments: Sequence[Segment], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Show the parameters for one operation, which may write them."""
        shown: list[Any] = []
        try:
            for segment in segments:
                if not self.is_open:
                    raise UsageError(
                        f"parameter {segment.name}: {name_of(func)} after `with tiered.construct(store):`; expected it"
                        " inside of that block, or tiered.shard(model, store) first"
                    )
                constructed: Any = segment.unit
                constructed.show()
                constructed.num_ops += 1
                shown.append(constructed)
            yield
        finally:
            for constructed in shown:
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

    def make_room(self, nbytes: int) -> None:
        """Over ranks: park the oldest, so that with ``nbytes`` more a part of the budget is shown."""
        for constructed in [each for each, gathered in self.seen.items() if not gathered.is_there(0)]:
            constructed.join()
        most = self.store.working_set.budget_bytes // _SHOWN_PART - nbytes
        for constructed in list(self.shown) if self.comm.world > 1 and self.shown_nbytes > most else ():
            if self.shown_nbytes > most and constructed.num_ops == 0:
                constructed.park()

    def _reclaim(self, nbytes: int) -> bool:
        if self.comm.world > 1:
            return False  # order: what one rank parks for want of memory it would bring back alone
        for constructed in list(self.shown):
            if constructed.num_ops == 0:
                constructed.park()
                return True
        return False

    def tier_of(self, device: torch.device) -> ComputeTier:
        """Return the tier of ``device``, whose memory is for a few parameters, or for one that is larger."""
        if device not in self._tiers:
            tier = self._tiers[device] = tier_of(device, self.store)
            tier.attach(lambda key: 0, lambda: self._reclaim(0))
        return self._tiers[device]

    def end(self) -> None:
        """Give every lease and all memory back; parameters may not be touched any more."""
        self.park_all()
        for constructed in list(self.seen):
            constructed.join()
        for tier in self._tiers.values():
            tier.forget()
        self.is_open = False


@contextmanager
def construct(store: Store, device: str | torch.device | None = None) -> Iterator[None]:
    """Build a model whose parameters live in ``store`` from the moment they are made.

    ``with tiered.construct(store): model = GPT(...)``, then ``tiered.shard(model, store)``. The constructor runs as it
    is; parameters may be read and written inside the block, in DRAM bounded by the store's budget. It runs on
    ``device``, or on torch's default device: values are drawn there, and a few parameters lie there at a time.
    Parameters on the meta device and tensors that are not parameters stay as they are. Not thread-safe. Raises
    CapacityError when one parameter is larger than the budget. Over ranks all do the same in the block; UsageError
    where they draw other random numbers.
    """
    guard_functorch()
    construction = _Construction(store)
    here = nullcontext() if device is None else named_device(device, store.device_memory)
    hook = register_module_parameter_registration_hook(construction.move_in)  # type: ignore[arg-type]
    try:
        with here:
            yield
    finally:
        hook.remove()
        construction.end()
