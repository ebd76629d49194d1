"""Unit: the parameters that move together as one key of the store, and where each of them lies in its bytes.

A unit knows how to lease its bytes and to show them through its parameters. When that happens is the engine's business,
what becomes of the bytes afterwards the working set's.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.units import round_up
from tiered.zero.gradients.backward import in_graph_task
from tiered.zero.parameters.functorch import check_no_transform
from tiered.zero.parameters.parameter import TieredParameter, without_dispatch
from tiered.zero.parameters.placeholder import ordinary_tensors, placeholder, unrecorded

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.gradients.gradients import UnitGradients

__all__ = ["SEGMENT_ALIGNMENT", "Segment", "Unit", "UnitState"]

SEGMENT_ALIGNMENT = 64
"""Bytes; the start of each parameter in its unit's buffer (design.md, section 9: off it, kernels give other bits)."""


class Segment:
    """One parameter's place in its unit's buffer: shape, strides and dtype, and ``offset`` and ``nbytes`` in bytes.

    Strides are the parameter's own when it is dense, else those of a contiguous tensor. The values of a dense tensor,
    in the order they lie in memory, are ``numel`` consecutive elements from ``offset``.
    """

    __slots__ = (
        "__weakref__", "_layout", "accumulated", "dtype", "grad_offset", "has_gradient", "name", "nbytes",
        "num_grad_touches", "num_no_grad_touches", "numel", "offset", "parameter", "shape", "strides", "trainable",
        "unit",
    )  # fmt: skip

    def __init__(self, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = tuple(parameter.shape)
        self.strides = dense_strides(parameter)
        self.dtype = dtype
        self.numel = parameter.numel()
        self.nbytes = self.numel * dtype.itemsize
        self.trainable = parameter.requires_grad
        self.offset = 0
        self.grad_offset = -1  # in the unit's gradient buffer; -1: none yet
        self.unit: Unit
        self.accumulated = False  # in the backward that runs now
        self.has_gradient = False  # since the last step
        self.num_grad_touches = 0
        self.num_no_grad_touches = 0
        self._layout: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {self.shape}, {self.dtype}, at {self.offset})"

    def flat(self, buffer: torch.Tensor, offset: int | None = None) -> torch.Tensor:
        """Return the (numel,) view of this segment in ``buffer`` (uint8, whole unit), in memory order."""
        start = self.offset if offset is None else offset
        return buffer[start : start + self.nbytes].view(self.dtype)

    def view(self, buffer: torch.Tensor, offset: int | None = None) -> torch.Tensor:
        """Return the view of this segment in ``buffer`` with the parameter's shape and strides."""
        return self.flat(buffer, offset).as_strided(self.shape, self.strides)

    def layout(self) -> torch.Tensor:
        """Return a meta tensor of the same shape, strides and dtype."""
        if self._layout is None:
            self._layout = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return self._layout

    def descriptor(self) -> dict[str, object]:
        """Return what a store must agree on to hold this parameter."""
        return {"name": self.name, "shape": list(self.shape), "strides": list(self.strides), "dtype": str(self.dtype)}


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor`` if its elements fill memory without gap or overlap, else contiguous ones."""
    expected = 1
    strides = tensor.stride()
    for stride, size in sorted((s, n) for s, n in zip(strides, tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        expected *= size
    return strides


class UnitState(enum.Enum):
    """Where a unit's parameters point, and what that costs in DRAM."""

    PARKED = "parked"  # placeholders; the bytes are the working set's to keep or drop
    OPEN = "open"  # placeholders, but the bytes are leased: saved references may be read
    SHOWN = "shown"  # the parameters are views of the leased bytes


class Unit:
    """Parameters that share one key: swapped in, shown, updated and swapped out together.

    Invariant: the parameters point at the leased buffer or at placeholders, never at bytes the unit does not lease.
    ``version`` counts the updates; a saved reference of an older version is refused rather than read wrongly.
    """

    __slots__ = (
        "__weakref__", "_opened_s", "_token", "_word", "engine", "gradients", "key", "lease", "name", "nbytes",
        "num_ops", "segments", "state", "version", "versions", "working_set",
    )  # fmt: skip

    gradients: UnitGradients
    engine: Engine

    def __init__(self, name: str, key: str, segments: Sequence[Segment], working_set: WorkingSet) -> None:
        self.name = name
        self.key = key
        self.segments = list(segments)
        self.working_set = working_set
        self.state = UnitState.PARKED
        self.lease: Lease | None = None
        self.num_ops = 0  # operations that are running on the shown parameters
        self.version = 0
        self.versions: tuple[int, ...] = ()  # version counters of the parameters when they were shown
        self._token: weakref.ref[ReferenceToken] | None = None
        self._opened_s = 0.0
        self._word = ""  # what it was opened for, for the recorder
        offset = 0
        for segment in self.segments:
            segment.unit = self
            segment.offset = offset
            offset = round_up(offset + segment.nbytes, SEGMENT_ALIGNMENT)
        self.nbytes = max(offset, SEGMENT_ALIGNMENT)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.segments)} parameters, {self.nbytes} B, {self.describe()})"

    def describe(self) -> str:
        """Return the state in words, for messages."""
        return f"unit {self.name!r} {self.state.value}"

    @property
    def is_in_backward(self) -> bool:
        """Whether the unit is open, and was opened in a backward."""
        return self.lease is not None and self._word == "backward"

    @property
    def room(self) -> str:
        """The name under which gradients will be leased while the unit is open; "" where none will."""
        return self.gradients.room if self.is_in_backward and self.gradients.nbytes else ""

    # -- leasing -------------------------------------------------------------------------------------------------

    @uninterrupted
    def open(self, mode: str = "r") -> torch.Tensor:
        """Lease the bytes if they are not leased and return them: (nbytes,) uint8. Blocks on a swap in.

        ``mode`` "rw" closes a lease for reading first.
        """
        if self.lease is not None and mode == "rw" and self.lease.mode == "r":
            self.park()
        if self.lease is None:
            check_no_transform(f"unit {self.name!r}: swap in")
            if self.engine.lanes is not None:
                self.engine.lanes.about_to_open(self)
        if self.lease is None:  # a micro-batch that took its turn may have opened it
            self.engine.before_open(self)
            with ordinary_tensors():  # order: later uses of the same lease may be recorded by autograd
                self.lease = self.working_set.lease(self.key, mode)
            self.state = UnitState.OPEN
            self._word = "backward" if in_graph_task() else "forward" if self.engine.calls else "open"
            self.engine.opened(self)
            # Order: once others are parked, so that what one thread does with one unit ends before the next begins.
            self._opened_s = time.monotonic()
        return self.lease.tensor

    @uninterrupted
    def show(self, mode: str = "r") -> None:
        """Make the parameters views of the leased bytes."""
        buffer = self.open(mode)
        if self.state is UnitState.SHOWN:
            return
        with without_dispatch(), unrecorded(), ordinary_tensors():
            for segment in self.segments:
                segment.parameter.data = segment.view(buffer)
            self.versions = tuple(segment.parameter._version for segment in self.segments)
        self.state = UnitState.SHOWN

    @uninterrupted
    def park(self) -> bool:
        """Point the parameters at placeholders and give the lease back; return False while an operation runs.

        Raises UsageError when a parameter was written through a lease for reading.
        """
        if self.num_ops or self.lease is None:
            return self.lease is None
        lease, self.lease = self.lease, None
        self.working_set.recorder.worked(self._word, self.name, self._opened_s)
        written = ""
        if self.state is UnitState.SHOWN:
            written = self._hide(check=lease.mode == "r")
        self.state = UnitState.PARKED
        self.engine.residency.parked(self)
        lease.release()
        if written:
            self.engine.abandon(f"parameter {written} was written in place outside tiered.unsharded")
            go_on = "store.rollback() to go on" if self.engine.store.durable else "start again in a new store"
            raise UsageError(
                f"parameter {written} was written in place during a forward or backward, as nn.Embedding(max_norm=) and"
                " layers that set themselves up by their first batch do; expected reads only: write between steps,"
                " inside `with tiered.unsharded(module):`, for the first batch `with tiered.unsharded(model),"
                f" torch.no_grad(): model(batch)`, without max_norm=; {go_on}"
            )
        return True

    def _hide(self, *, check: bool) -> str:
        written = ""
        with without_dispatch(), unrecorded():
            for segment, version in zip(self.segments, self.versions, strict=True):
                if check and segment.parameter._version != version:
                    written = segment.name
                segment.parameter.data = placeholder(segment.shape, segment.dtype)
        return written

    def forget(self) -> None:
        """Point the parameters at placeholders without giving anything back: in a forked child, after close."""
        self.lease = None
        self.state = UnitState.PARKED
        self._hide(check=False) if self.versions else None

    # -- saved references ----------------------------------------------------------------------------------------

    def token(self) -> ReferenceToken:
        """Return the token that every saved reference to the present bytes keeps alive."""
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

    def tiered(self, segment: Segment) -> TieredParameter:
        """Return the segment's parameter as what it is once sharded."""
        assert isinstance(segment.parameter, TieredParameter)
        return segment.parameter


class ReferenceToken:
    """Alive as long as some saved reference is; nothing else."""

    __slots__ = ("__weakref__",)
