"""The modes of torch in which a new tensor is not plain memory: nothing goes in or out of a store there."""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from tiered.errors import UsageError

__all__ = ["is_in_transform", "refuse_modes"]

_MODES = torch._C._TorchDispatchModeKey
_REFUSED = {_MODES.FAKE: "FakeTensorMode", _MODES.FUNCTIONAL: "FunctionalTensorMode", _MODES.PROXY: "make_fx"}


def refuse_modes(operation: str, key: str) -> None:
    """Raise UsageError where the caller's mode makes tensors without bytes, or records the operations on them."""
    if torch._C._len_torch_dispatch_stack():
        for mode, name in _REFUSED.items():
            if torch._C._get_dispatch_mode(mode) is not None:
                raise UsageError(
                    f"{operation} of {key!r} under {name}, in which new tensors are no memory to copy to; expected"
                    " outside of it"
                )
    if is_in_transform():
        raise UsageError(
            f"{operation} of {key!r} inside torch.func (grad, vjp, jvp, functionalize, ...), which wraps each tensor"
            " that is made there; expected before the transform: have the function take the tensor, or close over it"
        )


def is_in_transform() -> bool:
    """Whether a transform of torch.func wraps each tensor that is made now: all but vmap do."""
    stack = get_interpreter_stack()
    return bool(stack) and any(interpreter.key() != TransformType.Vmap for interpreter in stack)
