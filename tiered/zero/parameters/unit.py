"""Unit: the parameters that move together, one key of the store for each span of their layout.

A unit has its bytes gathered in a buffer and shows them through its parameters. The engine decides when; the working
set decides where the bytes go afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import xxhash

from tiered.errors import UsageError
from tiered.ranks.comm import NullComm
from tiered.store.residency.residency import Residency
from tiered.store.waiting.recorder import Begun
from tiered.tiers.compute_tier import BufferState, Collectives, ComputeTier, ParameterPlace, UnitBuffer
from tiered.zero.layout import SegmentSpec, UnitLayout, lay_out
from tiered.zero.parameters.tensor_without_bytes import placeholder, without_dispatch
from tiered.zero.step import graph_task

__all__ = ["Segment", "Unit", "dense_strides", "digest", "ordinary_tensors"]

_ALONE = NullComm()


def ordinary_tensors() -> AbstractContextManager[None]:
    """Return a block whose tensors autograd can save later, and that torch's profiler does not see: most often none.

    Autograd can save no tensor made inside of ``torch.inference_mode()``. The profiler reads addresses as it records
    shapes, which raises for a placeholder.
    """
    is_profiled = torch._C._autograd._profiler_enabled()
    return _ordinarily(is_profiled) if is_profiled or torch.is_inference_mode_enabled() else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _ordinarily(is_profiled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if is_profiled:
            torch._C._autograd._enable_record_function(False)
            stack.callback(torch._C._autograd._enable_record_function, True)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


class Segment:
    """One parameter in its unit: its looks and its place, ``offset`` and ``nbytes`` in bytes of its span.

    Strides are the parameter's own when it is dense, else those of a contiguous tensor. The values of a dense tensor,
    in the order they lie in memory, are ``numel`` consecutive elements from ``offset``. Its gradient lies at
    ``grad_offset`` of its unit's gradients, -1 where it has no place there: the span is frozen.

    ``stretch`` has the elements that lie in this rank's shard, all of them on one rank. They begin at byte
    ``shard_offset`` of the span's shard, and their gradient at ``shard_grad_offset`` of the unit's.
    """

    __slots__ = (
        "__weakref__", "_layout", "accumulated", "dtype", "grad_offset", "has_gradient", "is_recomputed", "name",
        "nbytes", "num_grad_touches", "num_no_grad_touches", "numel", "offset", "parameter", "shape",
        "shard_grad_offset", "shard_offset", "span", "stretch", "strides", "trainable", "unit", "was_trainable",
    )  # fmt: skip

    def __init__(self, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = tuple(parameter.shape)
        self.strides = dense_strides(parameter)
        self.dtype = dtype
        self.numel = parameter.numel()
        self.nbytes = self.numel * dtype.itemsize
        self.trainable = parameter.requires_grad  # as its unit is laid out: whether its span is
        self.was_trainable = self.trainable  # when the values entered the store
        self.span = 0
        self.offset = 0
        self.grad_offset = -1
        self.stretch = range(self.numel)
        self.shard_offset = 0
        self.shard_grad_offset = -1
        self.unit: Unit
        self.accumulated = False  # in the backward that runs now
        self.has_gradient = False  # since the last step
        self.is_recomputed = False  # by a reentrant checkpoint, in some forward: graphs may outlive the counts below
        self.num_grad_touches = 0
        self.num_no_grad_touches = 0
        self._layout: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.shape}, {self.dtype}, at {self.offset} of span {self.span})"

    @property
    def spec(self) -> SegmentSpec:
        """The description of this parameter that its unit is laid out for."""
        return SegmentSpec(self.name, self.shape, self.strides, self.dtype, self.trainable)

    def flat(self, span: torch.Tensor) -> torch.Tensor:
        """Return the (numel,) view of this segment in its ``span`` (uint8, whole), in memory order."""
        return span[self.offset : self.offset + self.nbytes].view(self.dtype)

    def view(self, span: torch.Tensor) -> torch.Tensor:
        """Return the view of this segment in its ``span`` with the parameter's shape and strides."""
        return self.flat(span).as_strided(self.shape, self.strides)

    def piece(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the (len(stretch),) view of this segment in this rank's ``shard`` of its span, uint8."""
        nbytes = len(self.stretch) * self.dtype.itemsize
        return shard[self.shard_offset : self.shard_offset + nbytes].view(self.dtype)

    def gradient_piece(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the (len(stretch),) view of this segment's gradient in this rank's shard of its unit's, uint8."""
        nbytes = len(self.stretch) * self.dtype.itemsize
        return gradients[self.shard_grad_offset : self.shard_grad_offset + nbytes].view(self.dtype)

    def gradient_view(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the view of this segment's gradient with the parameter's shape and strides."""
        start = self.grad_offset // self.dtype.itemsize
        return gradients.view(self.dtype).as_strided(self.shape, self.strides, start)

    def layout(self) -> torch.Tensor:
        """Return a meta tensor of the same shape, strides and dtype."""
        if self._layout is None:
            self._layout = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return self._layout

    def descriptor(self) -> dict[str, object]:
        """Return the description that a store must agree on to hold this parameter."""
        return {"name": self.name, "shape": list(self.shape), "strides": list(self.strides), "dtype": str(self.dtype)}


def digest(memory: torch.Tensor) -> int:
    """Return a 64-bit digest of the bytes of ``memory``, a contiguous tensor on the CPU."""
    content: Any = memory.detach().view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(content) if memory.numel() else 0


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor`` if its elements fill memory without gap or overlap, else contiguous ones."""
    expected = 1
    strides = tensor.stride()
    for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        expected *= size
    return strides


# [Note: the way of a unit]
#
# A unit is faulted in where its parameters are wanted, and goes where nothing needs them:
#
# 1. The hook before a module's forward (``ModuleCalls.begin_call``) or the first operation on a parameter
#    (parameter_access.py) calls ``Unit.show``; a reference that autograd has saved calls ``Unit.open``
#    (saved_references.py).
# 2. ``Engine.before_open`` waits for the unit's update, if one is pending. ``UnitBuffer.gather`` leases the unit's
#    keys: bytes that are only on NVMe are read into DRAM, and from there copied to a compute device, if there is one.
# 3. The GatherPlan says which units are parked around a gather: those that no call uses any more, and others where all
#    slots are taken. ``Engine.opened`` tells the schedule, which reads the keys ahead that came next in the step
#    before. On a compute device GatherAhead begins the copies of the units that the plan expects next.
# 4. ``UnitBuffer.show`` makes the parameters views of the bytes. Autograd holds no view of them: for a weight that it
#    saves, SavedPair hands it a SavedReference.
# 5. The hook after the forward (``ModuleCalls.end_call``) or the next unit that opens calls ``Unit.park``, as the plan
#    says: the parameters point at placeholders, the leases end, and the bytes may leave DRAM. A lack of memory parks no
#    unit. A backward opens the unit again from step 2 on; an update leases the keys by themselves.


class Unit:
    """Parameters that move together: swapped in, shown, updated and swapped out as one. See [Note: the way of a unit].

    Invariant: the parameters point at the buffer or at placeholders, never at bytes the unit does not lease. ``keys``
    are those of its spans, in order. An update writes the first few, ``trainable_keys``. ``version`` counts the
    updates; a saved reference of an older version is refused rather than read wrongly.
    """

    __slots__ = (
        "__weakref__", "_digests", "_known", "_opened", "_parameters", "_seen", "_token", "_use", "buffer", "comm",
        "engine", "gradient_nbytes", "gradients", "key", "keys", "layout", "name", "nbytes", "num_ops", "owner",
        "segments", "tier", "trainable_keys", "version", "versions", "working_set",
    )  # fmt: skip

    buffer: UnitBuffer
    engine: Any  # the Engine, of a room that stands above this one
    owner: Any  # Access, which the parameters ask at each operation
    gradients: Any  # UnitGradients, too
    layout: UnitLayout

    def __init__(
        self, name: str, segments: Sequence[Segment], working_set: Residency, tier: ComputeTier,
        comm: Collectives = _ALONE,
    ) -> None:  # fmt: skip
        self.name = name
        self.comm = comm
        self.segments = list(segments)
        self.working_set = working_set
        self.tier = tier
        self.num_ops = 0  # operations that are running on the shown parameters
        self.version = 0
        self.versions: tuple[int, ...] = ()  # version counters of the parameters when they were shown
        self._parameters = [segment.parameter for segment in self.segments]
        self._token: weakref.ref[ReferenceToken] | None = None
        self._opened = Begun(0.0)
        self._digests: tuple[int, ...] = ()  # of the spans, where they were leased for writing
        self._seen: tuple[int, ...] = ()  # of the same spans, at the last look
        self._known: list[int] = []  # the versions of the keys' bytes, as the last lease for reading had them
        self._use = ""  # for which it was opened: "forward", "backward" or "open"
        for segment in self.segments:
            segment.unit = self
        self.place(lay_out(name, [segment.spec for segment in self.segments], comm.world))

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.segments)} parameters, {self.nbytes} B, {self.describe()})"

    def place(self, layout: UnitLayout) -> None:
        """Have the bytes lie as ``layout`` says; moves none. The unit must not be open."""
        self.layout = layout
        self.nbytes, self.gradient_nbytes = layout.nbytes, layout.gradient_nbytes
        self.keys = tuple(span.key for span in layout.spans)
        self.trainable_keys = tuple(span.key for span in layout.spans if span.trainable)
        self.key = self.keys[0]
        pieces = []
        for segment, spec, place in zip(self.segments, layout.specs, layout.places, strict=True):
            segment.trainable = spec.trainable
            segment.span, segment.offset, segment.grad_offset = place
            pieces.append(ParameterPlace(place.span, place.offset // spec.dtype.itemsize, spec.shape, spec.strides))
            segment.stretch, segment.shard_offset, segment.shard_grad_offset = range(0), 0, min(place.grad_offset, 0)
        for number, start, stop, _, offset, grad_offset in layout.stretches(self.comm.rank):
            segment = self.segments[number]
            segment.stretch, segment.shard_offset, segment.shard_grad_offset = range(start, stop), offset, grad_offset
        spans = [(span.key, span.dtype) for span in layout.spans]
        self.buffer = UnitBuffer(spans, pieces, tier=self.tier, comm=self.comm)

    def keys_of(self, segments: Iterable[Segment]) -> dict[int, str]:
        """Return the keys of the spans in which ``segments`` lie, by the spans' numbers, in their order."""
        return {span: self.keys[span] for span in sorted({segment.span for segment in segments})}

    def describe(self) -> str:
        """Return the state in words, for messages."""
        return f"unit {self.name!r} {_WORDS[self.buffer.state]}"

    @property
    def world(self) -> int:
        """How many ranks have a shard each of the unit."""
        return self.layout.world

    @property
    def is_open(self) -> bool:
        """Whether the unit has its bytes."""
        return self.buffer.state is not BufferState.NONE

    @property
    def is_in_backward(self) -> bool:
        """Whether the unit is open, and was opened in a backward."""
        return self.is_open and self._use == "backward"

    # -- leasing -------------------------------------------------------------------------------------------------

    def open(self, mode: str = "r") -> list[torch.Tensor]:
        """Lease the bytes if they are not leased and return the spans: (nbytes,) uint8 each. Blocks on a swap in.

        ``mode`` "rw" closes a lease for reading first.
        """
        with self.working_set.mark:
            return self._open(mode)

    def show(self, mode: str = "r") -> None:
        """Make the parameters views of the leased bytes."""
        with self.working_set.mark:
            self._open(mode)
            if self.buffer.state is not BufferState.SHOWN:
                with without_dispatch(), ordinary_tensors():
                    self.buffer.show(self._parameters)
                    self.versions = tuple([parameter._version for parameter in self._parameters])

    def _open(self, mode: str) -> list[torch.Tensor]:
        buffer = self.buffer
        if mode == "rw" and buffer.mode == "r":
            self.park()
        if buffer.state is BufferState.NONE:
            engine = self.engine
            try:
                use, after = engine.before_open(self)
                with ordinary_tensors():  # order: later uses of the same lease may be recorded by autograd
                    buffer.gather(mode)
            except BaseException:
                engine.plan.released(self)
                raise
            self._use = use
            if mode == "rw":
                self._digests = self._seen = tuple([digest(lease.tensor) for lease in buffer.leases])
            elif self._known != (known := self._versions_of_keys()):  # a put or a lease of the key's own wrote
                self._known = known
                self.outdate()
            engine.opened(self, after)
            # Order: once others are parked, so that a thread has ended its work on one unit before the next begins.
            self._opened = self.working_set.recorder.begin()
        elif self.comm.world > 1 and (graph_task() != -1) != (self._use == "backward"):
            self._use = "backward" if graph_task() != -1 else "forward"
            self.engine.backward.entered(self._use)
        return buffer.tensors

    def park(self) -> bool:
        """Point the parameters at placeholders and give the leases back; return False while an operation runs.

        Raises UsageError when a parameter was written through a lease for reading.
        """
        with self.working_set.mark:
            buffer = self.buffer
            if buffer.state is BufferState.NONE:
                if self.engine.plan.ahead is self:
                    self.engine.plan.released(self)
                    self.engine.ahead.drop(self)
                return True
            if self.num_ops:
                return False
            self.look()  # order: where a copy out fails, the unit stays as it is
            self.working_set.recorder.worked(f"{self._use} unit", self.name, self._opened)
            written = ""
            if buffer.state is BufferState.SHOWN:
                written = self._hide(check=buffer.mode == "r")
            self.engine.plan.released(self)
            digests, self._digests = self._digests, ()
            buffer.release([n for n, before in enumerate(digests) if self._seen[n] == before])
            if digests:
                self._known = self._versions_of_keys()  # what they wrote was looked at
            if written:
                go_on = self.engine.phase.give_up(f"parameter {written} was written in place outside tiered.unsharded")
                raise UsageError(
                    f"parameter {written} was written in place during a forward or backward, as nn.Embedding(max_norm=)"
                    " and layers that set themselves up by their first batch do; expected reads only: write between"
                    " steps, inside `with tiered.unsharded(module):`, for the first batch `with"
                    f" tiered.unsharded(model), torch.no_grad(): model(batch)`, without max_norm=; {go_on}"
                )
            return True

    def was_written(self) -> bool:
        """Return whether a parameter was written since it was shown."""
        with without_dispatch():
            return self.versions != tuple([parameter._version for parameter in self._parameters])

    def outdate(self) -> None:
        """The bytes have changed, or are about to: saved references to the old ones are refused from now on."""
        self.version += 1

    def _versions_of_keys(self) -> list[int]:
        return [self.working_set.version(key) for key in self.keys]

    def look(self) -> None:
        """Outdate the bytes if they were written since the last look at a lease for writing; blocks on a copy out."""
        if not self._digests:
            return
        self.buffer.write_back()
        found = tuple([digest(lease.tensor) for lease in self.buffer.leases])
        if found != self._seen:
            self._seen = found
            self.outdate()

    def _hide(self, *, check: bool) -> str:
        written = ""
        with without_dispatch(), ordinary_tensors():
            for segment, version in zip(self.segments, self.versions, strict=True):
                if check and segment.parameter._version != version:
                    written = segment.name
                segment.parameter.data = placeholder(segment.shape, segment.dtype, self.tier.device)
        return written

    def forget(self) -> None:
        """Point the parameters at placeholders without giving anything back: in a forked child, after close."""
        self.buffer.forget()
        self._hide(check=False) if self.versions else None

    # -- saved references ----------------------------------------------------------------------------------------

    def token(self) -> ReferenceToken:
        """Return the token that every saved reference to the present bytes, of this ``version``, keeps alive."""
        self.look()
        token = self._token() if self._token is not None else None
        if token is None:
            token = ReferenceToken()
            self._token = weakref.ref(token)
        return token

    def has_references(self) -> bool:
        """Return whether autograd still holds saved references to this unit."""
        return self._token is not None and self._token() is not None

    def trainable_segments(self) -> Iterator[Segment]:
        """Yield the segments that require a gradient now."""
        with without_dispatch():
            yield from [segment for segment in self.segments if segment.parameter.requires_grad]


_WORDS = {BufferState.NONE: "parked", BufferState.GATHERED: "open", BufferState.SHOWN: "shown"}


class ReferenceToken:
    """A token that lives as long as a saved reference does."""

    __slots__ = ("__weakref__",)
