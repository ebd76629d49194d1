"""Tensors: which of them go into a store, which come out, and copies of those that are in DRAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from tiered.bytes.arena import Buffer
from tiered.bytes.host_tensor import empty_aligned
from tiered.errors import CapacityError, UsageError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import MAX_NUM_DIMS, Spec, is_kept
from tiered.store.residency.lease_view import EndedView, is_read_only
from tiered.store.residency.residency import Residency
from tiered.store.waiting.calling_thread import refuse_modes
from tiered.units import MiB, format_bytes

__all__ = ["check_block", "flat_of", "new_tensor", "plain_value", "read_resident", "result_for"]

_T = TypeVar("_T")

_OWN_PAGES_NBYTES = 32 * MiB  # from here on malloc maps new pages for each tensor too, but small ones: slow to touch


def check_block(what: str, nbytes: int, alignment: int) -> None:
    """Raise ValueError where a record cannot have blocks of ``nbytes``."""
    if not alignment <= nbytes <= BLOCK_NBYTES or nbytes & (nbytes - 1):
        raise ValueError(
            f"{what}: expected blocks of a power of two from {alignment} to {BLOCK_NBYTES} bytes, got {nbytes}"
        )


def plain_value(key: str, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` detached, resolved and contiguous. Raises TypeError for other tensors, UsageError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"put of {key!r}: expected a torch.Tensor, got {type(value).__name__}; torch.as_tensor(value) makes one of"
            " an array, a list or a number"
        )
    refuse_modes("put", key)
    if isinstance(value, EndedView):
        raise UsageError(f"put of {key!r}: the lease of the given view has ended; lease it again, or clone() it before")
    problem = ""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        problem = f"the subclass {type(value).__name__}; pass value.as_subclass(torch.Tensor) if its bytes are all"
    elif value.is_nested:
        problem = "a nested tensor; pass its parts, value.unbind(), under keys of their own"
    elif is_functorch_wrapped_tensor(value):
        problem = "an argument inside torch.func; put what the transform returns"
    elif value.is_meta:
        problem = "a meta tensor, which has no bytes"
    elif value.layout is not torch.strided:
        problem = f"a tensor of layout {value.layout}; pass value.to_dense(), or its parts under keys of their own"
    elif value.is_quantized:
        problem = f"a quantised tensor ({value.dtype}); pass value.int_repr() and keep scale and zero point yourself"
    elif not is_kept(value.dtype):  # bytes that were viewed so: no quantised tensor, and none can be made of them again
        problem = f"a tensor of dtype {value.dtype}; pass value.view(torch.uint8)"
    elif value.dim() > MAX_NUM_DIMS:
        problem = f"{value.dim()} dimensions, of which a catalog row holds {MAX_NUM_DIMS}; pass value.flatten()"
    if problem:
        raise TypeError(f"put of {key!r}: expected a dense strided tensor, got {problem}")
    return value.detach().resolve_conj().resolve_neg().contiguous()


def result_for(spec: Spec, key: str, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return ``out``, about to be overwritten, or a new tensor of ``spec``.

    Raises TypeError, ValueError or UsageError for an ``out`` that does not fit.
    """
    if out is None:
        return new_tensor(spec, key, device)
    if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or out.is_meta:
        raise TypeError(f"get({key!r}): out must be a dense tensor")
    if is_read_only(out):
        raise UsageError(f'get({key!r}): out is a view of a lease for reading; lease it with mode="rw", or clone() it')
    if out.dtype != spec.dtype or tuple(out.shape) != spec.shape:
        raise ValueError(
            f"get({key!r}): expected out of {spec.dtype} {list(spec.shape)}, got {out.dtype} {list(out.shape)}"
        )
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        raise ValueError(f"get({key!r}): out must be contiguous and not a lazy conjugate or negative")
    if out.requires_grad:
        raise UsageError(f"get({key!r}): out requires grad; pass out.detach()")
    if not out.is_inference():  # which has no version
        # Invariant: graphs that saved it know that it is overwritten; torch sees none of the ways bytes come by.
        torch.autograd.graph.increment_version(out)
    return out


def new_tensor(spec: Spec, key: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a new tensor of ``spec``, for bytes of ``key``. Raises CapacityError where there is no memory for it."""
    try:
        if spec.nbytes >= _OWN_PAGES_NBYTES and torch.device(device).type == "cpu":
            return empty_aligned(spec.nbytes, 1)[0].view(spec.dtype).view(spec.shape)
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch has no class for the CPU's
            raise
        raise CapacityError(
            f"get of {key!r}: no memory on {device} for the {format_bytes(spec.nbytes)} of its copy ({error}); free "
            "some memory, or read the tensor in parts, with read_part"
        ) from error


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the (nbytes,) uint8 view of a contiguous tensor; where it has one element its strides may be anything."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def read_resident(working_set: Residency, key: str, copy: Callable[[Spec, Buffer], _T], most_nbytes: int) -> _T:
    """Return ``copy(spec, buffer)`` of the bytes of ``key``, under a brief lease for reading; blocks.

    Of bytes that are on the device alone at most ``most_nbytes`` are swapped in. Raises ReadPastError for more.
    """
    alias, spec, _ = working_set.obtain(key, "r", most_nbytes=most_nbytes, is_brief=True)
    try:
        return copy(spec, alias.residence.buffer)
    finally:
        working_set.end_brief(alias)
