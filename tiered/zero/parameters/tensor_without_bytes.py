"""A tensor of true shape and dtype without bytes: a TieredParameter points at one while its values are swapped out.

The placeholder is the backstop for code that reaches a parameter past ``__torch_function__`` (TorchScript, collectives,
autograd in C++): torch's own storage raises an error for a read or a write, and never gives a number. torch has the
flag for this in every build, but its setter only in builds with CUDA. So the flag is found by measuring and tried
before use. The classes of tensors that may lack their values ask here which functions look at no value.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch
from torch._C._functorch import get_interpreter_stack

__all__ = [
    "LAYOUT",
    "METADATA",
    "close",
    "name_of",
    "placeholder",
    "without_dispatch",
]


_log = logging.getLogger("tiered")

_MESSAGE = (
    "a sharded parameter's values were touched past tiered, outside a forward or backward of its unit; expected"
    " `with tiered.unsharded(module):` between steps, or model.state_dict() for a copy"
)
_SEARCHED_NBYTES = 80  # of a StorageImpl; the flags are at 59..61 in torch 2.8-2.13 on 64 bits, the whole is larger


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of these looks whose values can be neither read nor written: RuntimeError.

    All placeholders of a dtype and device share one storage of a single element. Where torch cannot be made to refuse
    reads (said once in the log) they give NaN, or 0 for integers. Made outside of torch's modes, which may ask for
    addresses, as torch's own CUDA sanitizer does.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return _blank(dtype, device).expand(shape)


def is_in_mode() -> bool:
    """Return whether this thread is in one of torch's modes, or transforms, that see or change each operation."""
    num_modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return bool(num_modes or get_interpreter_stack()) or torch.is_inference_mode_enabled()


@functools.cache
def _blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    tensor = torch.full((), value, dtype=dtype, device=device)
    close(tensor, _MESSAGE)
    return tensor


def close(tensor: torch.Tensor, message: str) -> None:
    """Have torch refuse any read and write of the storage of ``tensor``: RuntimeError, with ``message`` if it can."""
    storage = tensor.untyped_storage()
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    set_message = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
    if set_message is not None:
        set_message(storage._cdata, message)
    elif (offset := _flag_offset()) is not None:
        _flags(storage)[offset] = 1


@functools.cache
def _flag_offset() -> int | None:
    """Return where a storage keeps "reading raises", in bytes, or None where it is not where it is expected.

    It follows the two flags that ``_set_throw_on_mutable_data_ptr`` sets; a storage of its own is the trial.
    """
    tensor = torch.ones((), dtype=torch.float32, device="cpu")
    flags = _flags(tensor.untyped_storage())
    before = bytes(flags)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    after = bytes(flags)
    changed = [i for i in range(_SEARCHED_NBYTES) if before[i] != after[i]]
    offset = changed[-1] + 1 if changed else 0
    if changed == [offset - 2, offset - 1] and after[offset - 2 : offset + 1] == b"\1\1\0":
        flags[offset] = 1
        if not _is_readable(tensor):
            return offset
        flags[offset] = 0
    _log.warning(
        "torch %s keeps its storage flags elsewhere: a parameter reached past torch's dispatch reads NaN instead of"
        " raising",
        torch.__version__,
    )
    return None


def _flags(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint8]:
    """Return the first bytes of the C++ object behind ``storage``; valid while it lives."""
    return (ctypes.c_uint8 * _SEARCHED_NBYTES).from_address(storage._cdata)


def _is_readable(tensor: torch.Tensor) -> bool:
    try:
        tensor.item()
    except RuntimeError:
        return False
    return True


# -- metadata ----------------------------------------------------------------------------------------------------------


without_dispatch = torch._C.DisableTorchFunctionSubclass
"""Context manager: inside it a TieredParameter is a plain tensor."""


def _functions(names: str) -> set[Any]:
    found: set[Any] = set()
    for name in names.split():
        member = getattr(torch.Tensor, name, None)
        if member is None:
            continue
        found |= {member} if callable(member) else {member.__get__, member.__set__}
        found |= {member.__delete__} if name == "grad" else set()
        if callable(getattr(torch, name, None)):
            found.add(getattr(torch, name))
    return found


METADATA = _functions(
    "shape dtype device layout ndim requires_grad grad is_leaf grad_fn _version output_nr _backward_hooks "
    "_post_accumulate_grad_hooks name names retains_grad is_sparse is_sparse_csr is_quantized is_meta is_cuda is_cpu "
    "is_xpu is_mps is_mkldnn is_nested is_xla is_ipu is_vulkan is_mtia is_maia itemsize nbytes _grad _cdata "
    "size dim numel nelement element_size is_floating_point is_complex is_signed is_inference is_conj is_neg "
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad get_device is_same_size __len__ "
    "__hash__ type_as_is has_names dense_dim sparse_dim"
)
METADATA.add(torch._has_compatible_shallow_copy_type)  # asked by model.to()
"""Functions that look at no value of a tensor, nor where it lies in memory."""
LAYOUT = _functions("stride is_contiguous storage_offset dim_order is_non_overlapping_and_dense")
"""Functions that look at how a tensor's values lie in memory, and at none of them."""


def name_of(func: Any) -> str:
    """Return the name of ``func`` in messages: the getter and the setter of ``data`` are ".data"."""
    name: str = getattr(func, "__name__", str(func))
    if name not in {"__get__", "__set__", "__delete__"}:
        return name
    attribute = func.__self__
    getter: Any = attribute.fget if isinstance(attribute, property) else attribute
    return f".{getter.__name__}"
