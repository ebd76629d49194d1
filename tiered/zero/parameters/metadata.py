"""The functions of torch that look at no value of a tensor, and the names that messages give to functions.

The classes of tensors that may lack their values ask here.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LAYOUT", "METADATA", "name_of", "without_dispatch"]

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
