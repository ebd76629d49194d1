"""Shard: this rank's stretch of one tensor of the store, as torch.distributed.checkpoint saves and loads it.

A parameter's elements in a rank's shard are consecutive in memory. Such a stretch of a tensor of N dimensions is at
most 2N - 1 rectangles, which is what a distributed checkpoint knows: so nothing is gathered to save or to load one.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tiered.errors import UsageError
from tiered.zero.parameters.tensor_without_bytes import close
from tiered.zero.parameters.unit import Segment

__all__ = ["FAILED", "LOADED", "NOTHING_TO_LOAD", "NOT_LOADED", "SavedCopies", "Shard"]

LOADED, NOT_LOADED, NOTHING_TO_LOAD, FAILED = 1, 2, 3, 4

_MOST_NBYTES = 64 << 20  # of one rectangle
_WINDOW_NBYTES = 256 << 20
_PART_NUMEL = 1 << 20


# -- rectangles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Consecutive ``elements`` of a dense tensor, in memory order, that are a rectangle of it."""

    offsets: torch.Size
    sizes: torch.Size
    elements: range

    def view(self, flat: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        """Return ``flat``, the elements, with the rectangle's shape; ``order`` has the dimensions, outermost first."""
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([self.sizes[dim] for dim in order]).permute(inverse)


def _order(strides: Sequence[int]) -> list[int]:
    """Return the dimensions of a dense tensor, the outermost in memory first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _rectangles(shape: Sequence[int], strides: Sequence[int], elements: range, most: int) -> list[_Rectangle]:
    """Return ``elements`` of such a tensor, in memory order, as rectangles of at most ``most`` elements each."""
    order = _order(strides)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    found, first = [], elements.start
    for offsets, sizes in _cut([shape[dim] for dim in order], elements.start, elements.stop, most):
        last = first + math.prod(sizes)
        at, its = (torch.Size([each[dim] for dim in inverse]) for each in (offsets, sizes))
        found.append(_Rectangle(at, its, range(first, last)))
        first = last
    return found


def _cut(sizes: Sequence[int], start: int, stop: int, most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the rectangles of elements [start, stop) of a contiguous tensor, in their order."""
    if start == stop:
        return
    if not sizes:
        yield (), ()
        return
    inner = math.prod(sizes[1:])
    while start < stop:
        row, begin = divmod(start, inner)
        if begin or stop - start < inner or inner > most:
            end = min(stop, (row + 1) * inner)
            for offsets, parts in _cut(sizes[1:], begin, end - row * inner, most):
                yield (row, *offsets), (1, *parts)
        else:
            num_rows = min((stop - start) // inner, most // inner)
            yield (row, *[0] * len(sizes[1:])), (num_rows, *sizes[1:])
            end = start + num_rows * inner
        start = end


# -- tensors -----------------------------------------------------------------------------------------------------------


class CheckpointTensor(torch.Tensor):
    """A tensor of the store as a distributed checkpoint sees it: true looks, no bytes, and this rank's rectangles."""

    shard: Shard

    @classmethod
    def of(cls, shard: Shard) -> CheckpointTensor:
        looks = {"strides": shard.strides, "dtype": shard.dtype, "device": torch.device("cpu")}
        tensor: CheckpointTensor = torch.Tensor._make_wrapper_subclass(cls, shard.shape, **looks)  # type: ignore[arg-type]
        tensor.shard = shard
        return tensor

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank saves. Raises UsageError in a block for ``load``."""
        properties = TensorProperties(dtype=self.shard.dtype)
        size = torch.Size(self.shard.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, place.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=place, properties=properties, size=size),
            )
            for place in self.shard.places(is_saved=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the places of what this rank loads. Raises UsageError in a block for ``save``."""
        return self.shard.places(is_saved=False)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the values of one rectangle to be saved, or the memory for the ones that are loaded."""
        assert index.offset is not None
        return self.shard.tensor(index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise UsageError(
            f"{func}: a tensor of tiered.sharded_state_dict has no values of its own; expected"
            " torch.distributed.checkpoint.save or load of it, which blocks (async_save copies all values first), or"
            " model.state_dict() for copies; a save that goes on behind the training is store.commit(wait=False)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"CheckpointTensor({tuple(self.shard.shape)}, {self.shard.dtype}, {len(self.shard.rectangles)} rectangles)"
        )


class SavedCopies:
    """The copies that a save has been given: each thread's last 256 MiB; the memory of earlier ones is taken back.

    torch's writers keep a reference to all that they have written until a file ends, and read each once. A read of a
    copy whose memory was taken back raises RuntimeError.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def add(self, copied: torch.Tensor) -> torch.Tensor:
        """Return ``copied``, and take back the memory of what this thread was given long before."""
        of_thread = vars(self._of_thread)
        kept: deque[torch.Tensor] = of_thread.setdefault("kept", deque())
        kept.append(copied)
        nbytes = of_thread.get("nbytes", 0) + copied.nbytes
        while len(kept) > 1 and nbytes > _WINDOW_NBYTES:
            earlier = kept.popleft()
            nbytes -= earlier.nbytes
            earlier.untyped_storage().resize_(0)
            close(earlier, "tiered.sharded_state_dict has taken back the memory of a tensor that was saved long before")
        of_thread["nbytes"] = nbytes
        return copied


class Shard:
    """This rank's stretch of one tensor: how it is read and, once there is a ``target``, the values loaded for it.

    ``dtype`` is that of the values to be saved, ``target_dtype`` that of those to be loaded, which a checkpoint may
    have in more bits. ``elements`` are in memory order; ``rectangles`` go by their offsets. ``target``: (numel,).
    ``is_loaded``: so was it on the ranks that have some of the tensor.
    """

    def __init__(
        self, name: str, segment: Segment, read: Callable[[range], torch.Tensor], *,
        dtype: torch.dtype, target_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.name, self.shape, self.strides = name, segment.shape, segment.strides
        self.dtype, self.target_dtype = dtype, target_dtype or dtype
        self.elements = segment.stretch
        self.target: torch.Tensor | None = None
        self._read, self._is_over = read, False
        found = _rectangles(self.shape, self.strides, self.elements, _MOST_NBYTES // dtype.itemsize)
        if not segment.numel:  # which all ranks have, and one saves
            found = [_Rectangle(torch.Size([0] * len(self.shape)), torch.Size(self.shape), range(0))]
        self.rectangles = {each.offsets: each for each in found}
        self._order = _order(self.strides)
        self._loaded: set[torch.Size] = set()
        self.is_loaded, self._is_planned = False, False

    @property
    def nbytes(self) -> int:
        """The bytes of a ``target``."""
        return len(self.elements) * self.target_dtype.itemsize

    def looks(self) -> CheckpointTensor:
        """Return the tensor that stands for this one in a state dict."""
        return CheckpointTensor.of(self)

    def places(self, *, is_saved: bool) -> list[ChunkStorageMetadata]:
        """Return the places of this rank's rectangles for a plan to save or to load them. Raises UsageError."""
        self._check_open()
        if is_saved != (self.target is None):
            has, needs = ("rw", "mode='r' to save") if is_saved else ("r", "mode='rw' to load")
            raise UsageError(f"{self.name}: the block of tiered.sharded_state_dict has mode={has!r}; expected {needs}")
        self._is_planned = True
        return [ChunkStorageMetadata(offsets=each.offsets, sizes=each.sizes) for each in self.rectangles.values()]

    def _check_open(self) -> None:
        if self._is_over:
            raise UsageError(f"{self.name}: the block of tiered.sharded_state_dict has ended; save or load inside it")

    def tensor(self, offsets: torch.Size) -> torch.Tensor:
        """Return the values of the rectangle at ``offsets``, a copy; or its part of the target, to be written."""
        self._check_open()
        if self.target is None and len(self.rectangles) > 1:
            _refuse_single_pieces(self.name)
        rectangle = self.rectangles[offsets]
        if self.target is None:
            return rectangle.view(self._read(rectangle.elements), self._order)
        self._loaded.add(offsets)
        return rectangle.view(self.values(slice(rectangle.elements.start, rectangle.elements.stop)), self._order)

    def loaded(self) -> int:
        """Return LOADED, NOT_LOADED or NOTHING_TO_LOAD. Raises UsageError for a tensor that was loaded in part."""
        if not self.elements:
            return NOTHING_TO_LOAD
        if self._is_planned and len(self._loaded) < len(self.rectangles):
            raise UsageError(
                f"{self.name}: {len(self._loaded)} of this rank's {len(self.rectangles)} rectangles were loaded, and"
                " nothing was changed; expected a torch.distributed.checkpoint.load that comes to its end"
            )
        return LOADED if self._loaded else NOT_LOADED

    def values(self, elements: slice) -> torch.Tensor:
        """Return loaded values, (numel,): a view of the target."""
        assert self.target is not None
        return self.target[elements.start - self.elements.start : elements.stop - self.elements.start]

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all loaded values, a part at a time, and their places in the memory order of the tensor."""
        for start in range(self.elements.start, self.elements.stop, _PART_NUMEL):
            part = slice(start, min(start + _PART_NUMEL, self.elements.stop))
            yield part, self.values(part)

    def end(self) -> None:
        """Refuse all uses from now on, and forget what was loaded."""
        self._is_over, self.target = True, None

    def __repr__(self) -> str:
        return f"Shard({self.name!r}, {self.elements}, {len(self.rectangles)} rectangles)"


def _refuse_single_pieces(name: str) -> None:
    """Raise UsageError where torch's writer of safetensors files asks, which keeps one piece of a tensor in a file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_write_files_from_queue":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None and str(frame.f_locals.get("serialization_format", "")).endswith("SAFETENSORS"):
        raise UsageError(
            f"{name}: torch's writer of safetensors files would keep one of its pieces alone; expected dcp.save with"
            " torch's own format, or tiered.save_pretrained(model, folder), which writes safetensors files"
        )
