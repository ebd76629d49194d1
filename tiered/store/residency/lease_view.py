"""LeaseBlock: the block around a lease that ``Store.lease`` returns, and its view after its end.

Torch itself refuses writes through a view for reading; a view whose block has ended refuses everything.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from tiered.errors import LeaseError, UsageError
from tiered.store.residency.residency import Lease

__all__ = ["EndedView", "LeaseBlock", "Mode", "is_read_only"]

Mode = Literal["r", "w", "rw"]


class LeaseBlock:
    """The context manager around one lease that ``Store.lease`` returns."""

    __slots__ = ("_key", "_lease", "_make_lease", "_mode", "_view")

    def __init__(self, make_lease: Callable[[str, str], Lease], key: str, mode: Mode) -> None:
        self._make_lease = make_lease
        self._key = key
        self._mode = mode
        self._lease: Lease | None = None
        self._view: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        if self._lease is not None:
            raise LeaseError(f"this lease of {self._key!r} was entered before; call lease() again")
        self._lease = self._make_lease(self._key, self._mode)
        self._view = view = self._lease.tensor
        if self._mode == "r":
            # Invariant: torch writes through mutable pointers alone, and the flag of a storage has it refuse these to
            # every alias of the bytes (p.data = view, set_, TorchScript, vmap). It costs 0.13 us here, nothing later.
            torch._C._set_throw_on_mutable_data_ptr(view)
        return view

    def __repr__(self) -> str:
        state = "not entered" if self._lease is None else "ended" if self._view is None else "open"
        return f"LeaseBlock({self._key!r}, {self._mode!r}, {state})"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lease is not None and self._view is not None
        view, self._view = self._view, None
        _end_view(view, self._key)
        del view
        has_ended = self._lease.release()
        if self._mode == "r" and _is_refusal(error):
            raise UsageError(
                f"torch refused an operation that writes, or asks for the right to write, through a lease for reading "
                f"(of {self._key!r}, or of a block around it), whose bytes are as they were; "
                'lease it with mode="rw", or clone() the view'
            ) from error
        if not has_ended and error is None:
            raise LeaseError(
                f"the lease of {self._key!r} ended while tensors made from its view are alive: clone() what must "
                "outlive the block; until they are gone their bytes count in the DRAM budget"
            )


def is_read_only(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of ``tensor``, of any class, are those of a lease for reading."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            tensor.data_ptr()
        except RuntimeError as error:
            return _is_refusal(error)
    return False


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether torch refused to write to a storage that is only to be read."""
    return isinstance(error, RuntimeError) and "Cannot access data pointer of Tensor" in str(error)


def _end_view(view: torch.Tensor, key: str) -> None:
    """Take the bytes away from the object that the caller's ``as`` name still refers to."""
    view.data = torch.empty(0, dtype=view.dtype, device="cpu")
    view.grad = None
    view.__class__ = EndedView
    view.tiered_key = key  # type: ignore[attr-defined]


class EndedView(torch.Tensor):
    """A view after its block: every use raises."""

    tiered_key: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ended = next((arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, EndedView)), None)
        key = "a key" if ended is None else repr(ended.__dict__.get("tiered_key", ""))
        raise UsageError(f"{getattr(func, '__name__', func)} on a view whose lease of {key} has ended; lease it again")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EndedView({self.__dict__.get('tiered_key', '')!r})"
