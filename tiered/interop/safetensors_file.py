"""A safetensors file, written a tensor at a time: header first, no more than a few pieces in memory.

The safetensors library writes what lies in memory whole; so the writer is this room's own, the readers are theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tiered.bytes.file_stream import PIECE_NBYTES, FileWriter
from tiered.errors import UsageError
from tiered.store.format.safetensors_header import DTYPE_NAMES
from tiered.units import round_up
from tiered.zero.deferred_tensor import DeferredTensor

__all__ = ["write_safetensors"]

_LENGTH_NBYTES = 8
_ALIGNMENT = 4096  # of the first tensor: so whoever reads the file past the page cache copies less


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``tensors``, deferred ones among them, to the new file ``path``; blocks until it is durable.

    Each is read when its turn comes, and let go then. Raises UsageError for a dtype that the format lacks,
    CapacityError where the file does not fit, DeviceError, and what reading a tensor raises: the file stays unfinished.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so that each is aligned to its dtype
    header, nbytes = _header({name: tensors[name] for name in order}, metadata)
    with FileWriter(str(path), len(header) + nbytes) as file:
        file.write(memoryview(header))
        for name in order:
            _write(file, tensors[name])
        file.finish()


def _write(file: FileWriter, tensor: torch.Tensor) -> None:
    """Write the values of ``tensor``. Lifetime: nothing refers to them when this returns; they may be leased bytes."""
    for piece in _pieces(tensor.values() if isinstance(tensor, DeferredTensor) else tensor.detach().cpu()):
        file.write(memoryview(piece.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the length and the header, padded, and the bytes of all tensors."""
    if "__metadata__" in tensors:
        raise UsageError("a tensor is named __metadata__, which is another thing in safetensors files; rename it")
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in tensors.items():
        dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
        shape, end = list(tensor.shape), place + tensor.numel() * tensor.dtype.itemsize
        if dtype is None or (dtype == "F4" and not shape):
            raise UsageError(
                f"{name} is {tensor.dtype} {shape}, which safetensors lacks; expected one of {DTYPE_NAMES}"
            )
        if dtype == "F4":
            shape[-1] *= 2  # torch has two in an element
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    nbytes = round_up(_LENGTH_NBYTES + len(text), _ALIGNMENT) - _LENGTH_NBYTES
    return nbytes.to_bytes(_LENGTH_NBYTES, "little") + text.ljust(nbytes), place


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the values of ``tensor`` in their order, in contiguous pieces that are no copies, or small ones."""
    if tensor.is_contiguous() or tensor.nbytes <= PIECE_NBYTES:
        yield tensor.contiguous()
    else:
        for part in tensor.unbind() if tensor.shape[0] <= 1 else torch.split(tensor, _rows(tensor)):
            yield from _pieces(part)


def _rows(tensor: torch.Tensor) -> int:
    """Return how many rows of ``tensor`` make a piece, fewer than it has."""
    row_nbytes = tensor.nbytes // tensor.shape[0]
    return min(max(PIECE_NBYTES // row_nbytes, 1), tensor.shape[0] - 1)
