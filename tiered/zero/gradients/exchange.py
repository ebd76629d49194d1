"""ShardGradient: this rank's shard of the gradients of one unit over several ranks, and the sum that makes it.

In each backward a unit's whole gradients go to the ranks whose shards they belong to. Each rank adds what it receives
in fp32, in the order of the ranks, multiplies with fp32(1 / world), rounds once to the gradients' dtype and adds that
to the shard's gradient: the same bits for any transport. Parameters beside the sharded ones are whole on each rank, and
so are their gradients, with the same sum.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.gradients.stand_in import Compute, UsedGradient
from tiered.zero.parameters.module_calls import EngineParts
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives

__all__ = ["PlainGradients", "ShardGradient", "add_mean"]

_TILE_NUMEL = 1 << 18  # elements that are summed at one time: 1 MiB in fp32
_DEVICE_TILE_NUMEL = 1 << 22  # on a compute device, whose every tile is a copy to DRAM of its own


def add_mean(out: torch.Tensor, pieces: torch.Tensor, *, is_first: bool) -> None:
    """Add the mean of ``pieces``, (world, numel), to ``out``, (numel,) of the same dtype; ``is_first``: write it there.

    The sum is taken where the pieces are, in fp32 (fp64 for fp64), in the order of the ranks, and rounded once. ``out``
    is in DRAM; blocks on copies to it.
    """
    world, numel = pieces.shape
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    factor = torch.tensor(1 / world, dtype=dtype, device="cpu")
    most = _TILE_NUMEL if pieces.is_cpu else _DEVICE_TILE_NUMEL
    total = torch.empty(min(numel, most), dtype=dtype, device=pieces.device)
    for start in range(0, numel, most):
        tile = total[: min(most, numel - start)]
        stop = start + tile.numel()
        tile.copy_(pieces[0, start:stop])
        for rank in range(1, world):
            tile.add_(pieces[rank, start:stop])
        tile.mul_(factor)
        if is_first:
            copy_across(out[start:stop], tile if tile.is_cpu else tile.to(out.dtype))
        else:
            out[start:stop].add_(tile.to(out.dtype).cpu())


class ShardGradient:
    """The gradients of one unit in this rank's shard, from the first exchange of a step to the update that takes them.

    They are in DRAM, wherever the model computes. The bytes are those of scratch ``key``, laid out as the shards of the
    trainable spans, one after the other. ``segments`` are the parameters with a gradient on some rank. Invariant:
    ``buffer`` is leased, or the working set has the bytes, or ``segments`` is empty.
    """

    __slots__ = ("_has_key", "buffer", "key", "norms", "num_added", "own_norms", "segments", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.key = f"model/gradient/.shard/{unit.name}"
        self.segments: dict[Segment, None] = {}
        self.num_added = 0  # exchanges since there were none
        self.own_norms: dict[Segment, tuple[float, float]] = {}  # 2-norm and largest magnitude of this rank's piece
        self.norms: dict[Segment, torch.Tensor] = {}  # those of all ranks, (2, world) fp64, once they have told them
        self.buffer: GradientBuffer | None = None
        self._has_key = False

    def __repr__(self) -> str:
        return f"ShardGradient({self.unit.name!r}, {len(self.segments)} parameters)"

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.unit.layout.shard_gradient_nbytes

    def add(self, received: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Add the mean of what all ranks have sent, for ``segments``; blocks where DRAM is short.

        ``received``: (nbytes,) uint8, of each trainable span the pieces of all ranks, one after the other.
        """
        is_first = not self.segments
        buffer, layout = self.leased(), self.unit.layout
        start = 0
        for span in layout.spans:
            if span.trainable:
                pieces = received[start : start + span.nbytes].view(span.dtype).view(layout.world, -1)
                place = span.grad_offset // layout.world
                add_mean(buffer[place : place + span.shard_nbytes].view(span.dtype), pieces, is_first=is_first)
                if not pieces.is_cpu:
                    self.unit.tier.note_copy_out(span.shard_nbytes)
                start += span.nbytes
        self.segments |= dict.fromkeys(segments)
        self.num_added += 1
        if not self.unit.engine.phase.updates_in_backward:  # nobody may ask then
            self.own_norms = {segment: _norms(segment.gradient_piece(buffer)) for segment in self.segments}

    def apply(self, sources: Mapping[Segment, UsedGradient]) -> None:
        """Apply the changes that are pending in ``sources``."""
        for segment, source in sources.items():
            changes = source.changes_in_dram()
            source.take_pending()
            for change in changes:
                change(segment.gradient_piece(self.leased()))

    def ask_all(self, segment: Segment, source: UsedGradient, compute: Compute) -> torch.Tensor:
        """Return ``compute`` of each rank's piece, with the changes that are pending, (world,); all ranks ask together.

        0 where a rank has no piece. Blocks.
        """
        assert isinstance(self.unit.comm, UnitCollectives)
        mine = torch.zeros((), dtype=torch.float64, device="cpu")
        if segment.stretch:
            piece = segment.gradient_piece(self.leased())
            if source.pending:
                piece = piece.clone()
                for change in source.changes_in_dram():
                    change(piece)
            mine = compute(piece).to(torch.float64)
        return self.unit.comm.numbers(f"a norm of {segment.name}", mine)

    def leased(self) -> torch.Tensor:
        """Return the shard, (nbytes,) uint8, leased to be read and changed; blocks."""
        gradients = self.unit.gradients
        if self.buffer is None:
            if not self.segments and gradients.taken is not None and not gradients.taken.is_over:
                self.unit.engine.finish_update(self.unit)
            gradients.model.make_room_for_shard(self.nbytes)
            working_set, tier = self.unit.working_set, self.unit.tier
            if self.segments:
                lease = tier.lease(self.key, "rw")
            else:
                if not self._has_key:
                    working_set.create(self.key, self.nbytes, scratch=True)
                    self._has_key = True
                tier.settle(self.key)
                lease = working_set.lease_anew(self.key)
            self.buffer = GradientBuffer(working_set, lease)
            gradients.model.opened_shard(self)
        return self.buffer.tensor

    def store_away(self) -> bool:
        """Give the bytes to the working set; return whether there were any to give."""
        buffer = self._close()
        if buffer is not None:
            buffer.store()
        return buffer is not None

    def take(self) -> GradientBuffer | None:
        """Hand the bytes over to an update: return their lease, None where the working set has them."""
        self.segments, self.own_norms, self.norms, self.num_added = {}, {}, {}, 0
        self.unit.gradients.model.rooms.filled.discard(self.key)
        return self._close()

    def _close(self) -> GradientBuffer | None:
        buffer, self.buffer = self.buffer, None
        self.unit.gradients.model.closed_shard(self)
        return buffer

    def drop(self) -> None:
        """Forget the gradients, if there are any."""
        were_there = bool(self.segments)
        buffer = self.take()
        if buffer is not None:
            buffer.discard()
        elif were_there:
            self.unit.tier.drop_bytes(self.key)

    def zero(self) -> None:
        """Fill the gradients with zeros."""
        if self.segments:
            self.leased().zero_()
        self.own_norms = dict.fromkeys(self.own_norms, (0.0, 0.0))
        self.norms = {segment: torch.zeros_like(norms) for segment, norms in self.norms.items()}

    def forget_key(self) -> None:
        """Delete the key: the unit is about to be laid out anew."""
        self.drop()
        if self._has_key:
            self._has_key = False
            self.unit.working_set.delete([self.key])


def _norms(piece: torch.Tensor) -> tuple[float, float]:
    """Return the 2-norm and the largest magnitude of ``piece``, added up in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if piece.dtype is torch.float64 else torch.float32
    if not piece.numel():
        return 0.0, 0.0
    norm = torch.linalg.vector_norm
    return norm(piece, 2.0, dtype=dtype).item(), norm(piece, float("inf"), dtype=dtype).item()


# -- plain parameters --------------------------------------------------------------------------------------------------


_all: weakref.WeakSet[PlainGradients] = weakref.WeakSet()


class PlainGradients:
    """The gradients of plain parameters over several ranks: those that a model has beside the sharded ones.

    Each rank has them whole. Their values become those of rank 0 in the first forward, or optimizer, that finds them.
    The gradients that backwards add up are this rank's alone until one ends outside of ``tiered.accumulate``: then one
    collective brings those of all ranks, and ``.grad`` becomes the mean, added to that of earlier backwards, with the
    same bits on all ranks. Meanwhile world + 2 times the gradients are in ordinary memory, outside of the DRAM budget.

    ``_known`` has all of them by name, the same on all ranks. Invariant: ``.grad`` of those in ``_held`` is this rank's
    alone, and the value there what was exchanged already.
    """

    def __init__(self, engine: EngineParts, collectives: UnitCollectives, seen: Callable[[], None]) -> None:
        """``seen()``: a backward runs, whose end must be reported."""
        self._engine, self._collectives, self._seen = engine, collectives, seen
        self._known: dict[str, torch.Tensor] = {}
        self._updated: dict[str, torch.Tensor] = {}  # by the optimizer
        self._hooks: dict[torch.Tensor, tuple[Any, Any]] = {}
        self._held: dict[torch.Tensor, torch.Tensor | None] = {}
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}  # set aside, until autograd has added
        self._has_accumulated = False  # in this backward
        _all.add(self)

    def __repr__(self) -> str:
        return f"PlainGradients({len(self._known)} parameters, {len(self._held)} gradients of this rank alone)"

    @staticmethod
    def of(store: Store) -> PlainGradients | None:
        """Return those of the model that is sharded in ``store``, if there is one."""
        return next((each for each in _all if each._engine.store is store), None)

    # -- parameters ----------------------------------------------------------------------------------------------

    def look(self, updated: Mapping[str, torch.Tensor] | None = None) -> None:
        """Follow the parameters that are there now; where some are new, blocks for all ranks.

        ``updated``: those of the optimizer, by name, in the model or not. Raises UsageError, on all ranks, where the
        parameters are not the same on all.
        """
        self._updated = self._updated if updated is None else dict(updated)
        model = self._engine.model()
        every = () if model is None else model.named_parameters()
        found: dict[str, torch.Tensor] = {n: p for n, p in every if not isinstance(p, TieredParameter) and p.numel()}
        ours = set(map(id, found.values()))
        beside = {f"{name} of the optimizer": p for name, p in self._updated.items() if id(p) not in ours and p.numel()}
        found |= beside
        if [(name, id(p)) for name, p in found.items()] != [(name, id(p)) for name, p in self._known.items()]:
            self._agree(found)
        for parameter in found.values():
            if parameter.requires_grad and parameter not in self._hooks:
                self._watch(parameter)

    def _agree(self, found: dict[str, torch.Tensor]) -> None:
        """Take over ``found``, the same on all ranks; those that are new get the values of rank 0."""
        old = set(map(id, self._known.values()))
        new = [parameter for parameter in found.values() if id(parameter) not in old]
        lines = [
            f"{'another' if id(p) in old else 'a new'} parameter {name}, {tuple(p.shape)} {p.dtype}"
            for name, p in found.items()
        ]
        advice = "the same ones on all ranks, with the same names, shapes and dtypes, added in the same order"
        self._collectives.ranks.check_equal("parameters beside the sharded ones", lines, advice)
        with torch.no_grad():
            for parameter, value in zip(new, self._collectives.of_first(new), strict=True):
                parameter.copy_(value)
        self._known = found
        kept = set(map(id, found.values()))
        for parameter in [each for each in self._hooks if id(each) not in kept]:
            self._held.pop(parameter, None)
            for hook in self._hooks.pop(parameter):
                hook.remove()

    def _watch(self, parameter: torch.Tensor) -> None:
        own, its = weakref.ref(self), weakref.ref(parameter)  # lifetime: the collector does not look into hooks

        def accumulating(_: torch.Tensor) -> None:
            me, parameter = own(), its()
            if me is not None and parameter is not None:
                me._accumulating(parameter)

        def accumulated(parameter: torch.Tensor) -> None:
            me = own()
            if me is not None and parameter in me._before:
                me._held[parameter] = me._before.pop(parameter)
            if me is not None:
                me._has_accumulated = True

        post = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        self._hooks[parameter] = (parameter.register_hook(accumulating), post)  # type: ignore[no-untyped-call]

    # -- gradients -----------------------------------------------------------------------------------------------

    def _accumulating(self, parameter: torch.Tensor) -> None:
        """Autograd is about to accumulate the gradient of ``parameter``, or torch.autograd.grad to return it."""
        with self._engine.working_set.mark:
            self._seen()
            if parameter in self._held:
                if parameter.grad is None:  # the caller has dropped it
                    self._held[parameter] = None
            elif parameter not in self._before:
                self._before[parameter], parameter.grad = parameter.grad, None

    def restore(self) -> None:
        """A backward is over: what was set aside is the gradient again, unless autograd has added to it."""
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        self._before.clear()

    def clear_accumulated(self) -> bool:
        """Forget what the backward has done; return whether it has accumulated anything."""
        self.restore()
        found, self._has_accumulated = self._has_accumulated, False
        return found

    def have_graphs(self) -> bool:
        """Return whether this rank's gradients are differentiable, by backward(create_graph=True)."""
        return any(p.grad is not None and p.grad.requires_grad for p in self._held)

    def are_added(self) -> bool:
        """Return whether there are gradients that only backwards under ``tiered.accumulate`` have added to."""
        self.restore()  # after a backward that failed
        return any(parameter.grad is not None for parameter in self._held)

    def drop(self) -> None:
        """Drop the gradients of this rank alone."""
        for parameter in self._held:
            parameter.grad = None
        self._held.clear()

    def forget(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of ``parameters`` were dropped or zeroed: forget what they were."""
        for parameter in parameters:
            self._held.pop(parameter, None)

    def mask(self) -> bytes:
        """Return a bit for each parameter: whether this rank has a gradient to exchange."""
        known = self._known.values()
        bits = sum(1 << n for n, p in enumerate(known) if p in self._held and p.grad is not None)
        return bits.to_bytes(-(-len(known) // 8), "little")

    def exchange(self, masks: Sequence[bytes]) -> None:
        """Make the gradients that some rank has the means of all; ``masks`` are the bits of each. Blocks."""
        bits = functools.reduce(operator.or_, [int.from_bytes(mask, "little") for mask in masks])
        used = [parameter for n, parameter in enumerate(self._known.values()) if bits >> n & 1]
        with torch.no_grad():
            parts = [self._own(parameter) for parameter in used]
            if parts:
                flat = torch.cat([part.view(torch.uint8) for part in parts])
                (whole,) = self._collectives.all_gather([flat], "plain gradients")
                columns = torch.split(whole.view(len(masks), -1), [part.nbytes for part in parts], dim=1)
                for parameter, mean, pieces in zip(used, parts, columns, strict=True):
                    add_mean(mean, pieces.contiguous().view(mean.dtype), is_first=True)
                    self._add(parameter, mean.view(parameter.shape))
        self._held.clear()

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's gradient, (numel,) in the order of indices; zeros where there is none."""
        own = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
        if parameter in self._held and parameter.grad is not None:
            if parameter.grad.layout is not torch.strided:
                names = [name for name, each in self._known.items() if each is parameter]
                raise UsageError(f"parameter {names[0]}: a {parameter.grad.layout} gradient; expected a dense one")
            own.copy_(parameter.grad)
        return own.view(-1)

    def _add(self, parameter: torch.Tensor, mean: torch.Tensor) -> None:
        """Add ``mean`` to what earlier backwards of the step have exchanged."""
        before = parameter.grad
        if parameter in self._held:  # the caller may have dropped it since
            before = None if before is None else self._held[parameter]
        parameter.grad = (
            torch.empty_like(parameter).copy_(mean) if before is None else before.add_(mean.to(before.device))
        )
