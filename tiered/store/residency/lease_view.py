"""LeaseBlock: the block around a lease that ``Store.lease`` returns, and the views that the block hands out.

A view for reading refuses writes, and a view whose block has ended refuses everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType, TracebackType
from typing import Any, Literal

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from tiered.bytes.host_tensor import address_of, storage_address
from tiered.errors import LeaseError, UsageError
from tiered.store.residency.residency import Lease

__all__ = [
    "EndedView",
    "LeaseBlock",
    "Mode",
    "ReadOnlyView",
    "flat_values",
    "is_read_only",
    "name_of",
    "plain_of",
    "write_targets",
]


# -- write targets -----------------------------------------------------------------------------------------------------


_ALWAYS_WRITES = {"__setitem__", "__dlpack__", "__delitem__", "_typed_storage", "module_load", "storage"}
_NO_WRITES = {"__index__", "__int__", "__invert__", "__init__", "__init_subclass__"}
_SETTERS = {torch.Tensor.data.__set__, torch.Tensor.real.__set__, torch.Tensor.imag.__set__}  # type: ignore[attr-defined]
_RUNNING = {functional.batch_norm: 1, functional.instance_norm: 1}  # where the running mean is; elsewhere it is fourth


def write_targets(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that ``func(*args, **kwargs)``, as ``__torch_function__`` is given it, would write to.

    Those of an ``inplace`` argument, and of operators with names of their own, torch alone knows.
    """
    name = name_of(func)
    targets = flat_values((kwargs.get("out"),)) + _running_statistics(func, args, kwargs)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if func in _SETTERS or name in _ALWAYS_WRITES or (name.startswith("__i") and name not in _NO_WRITES):
        is_in_place = True
    if is_in_place:
        targets += flat_values(args[:1] or tuple(kwargs.values())[:1])
    if kwargs.get("max_norm") is not None:  # of an embedding, which renormalises rows of its weight
        targets += flat_values((args[1:2], kwargs.get("weight")))
    return targets


def flat_values(values: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts."""
    if isinstance(values, dict):
        values = values.values()
    leaves: list[Any] = []
    for value in values:
        leaves += flat_values(value) if isinstance(value, list | tuple | dict) else [value]
    return leaves


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of ``func`` for messages."""
    return getattr(func, "__name__", repr(func)).partition(".")[0]  # of an operator without its overload


def _running_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the mean and variance that a normalisation in training updates; no schema says so."""
    if not name_of(func).endswith(("batch_norm", "instance_norm")):
        return []
    is_training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    first = _RUNNING.get(func, 3)
    return [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")] if is_training else []


# -- lease block -------------------------------------------------------------------------------------------------------


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
        try:
            return self._begin()
        except BaseException:
            self._give_back()
            raise

    def _begin(self) -> torch.Tensor:
        self._lease = self._make_lease(self._key, self._mode)
        view = self._lease.tensor
        if self._mode == "r":
            # Invariant: torch writes through mutable pointers alone, and the flag of a storage has it refuse these to
            # every alias of the bytes (p.data = view, set_, TorchScript, vmap). It costs 0.13 us here, nothing later.
            torch._C._set_throw_on_mutable_data_ptr(view)
            _make_read_only(view, self._key)
        self._view = view
        return view

    def __repr__(self) -> str:
        state = "not entered" if self._lease is None else "ended" if self._view is None else "open"
        return f"LeaseBlock({self._key!r}, {self._mode!r}, {state})"

    def _give_back(self) -> None:
        """Release a lease that was made before an interrupt: its block will not be left."""
        if self._lease is not None:
            if self._view is not None:
                _end_view(self._view, self._key)
            self._lease.release()

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


def plain_of(view: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor on the bytes of ``view``, for code that only reads."""
    with torch._C.DisableTorchFunctionSubclass():
        return view.detach()


def _make_read_only(view: torch.Tensor, key: str) -> None:
    # Lifetime: the object changes its class; another object on the same bytes would keep them alive.
    view.__class__ = ReadOnlyView
    view.tiered_key = key  # type: ignore[attr-defined]


def _end_view(view: torch.Tensor, key: str) -> None:
    """Take the bytes away from the object that the caller's ``as`` name still refers to."""
    with torch._C.DisableTorchFunctionSubclass():
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
        ended = next((arg for arg in flat_values((args, kwargs)) if isinstance(arg, EndedView)), None)
        key = "a key" if ended is None else repr(ended.__dict__.get("tiered_key", ""))
        raise UsageError(f"{name_of(func)} on a view whose lease of {key} has ended; lease it again")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EndedView({self.__dict__.get('tiered_key', '')!r})"


class ReadOnlyView(torch.Tensor):
    """A view of a lease for reading: all but writing. Tensors that share its bytes are read-only, too.

    Torch refuses all writes by itself; the refusals here come before an operation begins, and name key and remedy.
    """

    tiered_key: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        targets = write_targets(func, args, kwargs)
        target = next((arg for arg in targets if isinstance(arg, ReadOnlyView)), None)
        if target is not None:
            raise _refusal(f"{name} would write", target)
        views = [arg for arg in flat_values((args, kwargs)) if isinstance(arg, ReadOnlyView)]
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data_ptr":
                return address_of(args[0])
            if name in {"numpy", "__array__"}:  # from_numpy writes through arrays that refuse to be written
                args, kwargs = _copied(args, kwargs)
                array = func(*args, **kwargs)
                array.flags.writeable = False
                return array
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if not _is_refusal(error):
                    raise
                if isinstance(func, _OPERATIONS) and not any(isinstance(each, torch.Tensor) for each in targets):
                    return _read_copies(func, args, kwargs)
                raise _refusal(f"{name} asks for the right to write", views[0]) from error
            if isinstance(result, torch.UntypedStorage):  # autograd's hooks know tensors by it
                result.__class__ = _ReadOnlyStorage
                result.__dict__["tiered_key"] = views[0].__dict__.get("tiered_key", "")
                return result
            return _guard(result, views)

    def __format__(self, spec: str) -> str:
        return format(plain_of(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor of its own."""
        memo[id(self)] = copied = plain_of(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as an ordinary tensor: there is no lease where it is loaded."""
        return plain_of(self).clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch has no types for it


_OPERATIONS = (BuiltinFunctionType, MethodDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _copied(args: Any, kwargs: Any) -> Any:
    return tree_map_only(ReadOnlyView, torch.clone, (args, kwargs))


def _read_copies(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what an operation that reads by pointers for writing, as torch.lstm does, makes of copies of the views."""
    copied_args, copied_kwargs = copied = _copied(args, kwargs)
    result = func(*copied_args, **copied_kwargs)
    for view, copy in zip(flat_values((args, kwargs)), flat_values(copied), strict=True):
        if view is not copy and not torch.equal(_bytes_of(view), _bytes_of(copy)):
            raise _refusal(f"{name_of(func)} would write", view)
    return result


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _refusal(what: str, view: Any) -> UsageError:
    return UsageError(
        f"{what} to {view.__dict__.get('tiered_key', '')!r} through a lease for reading; lease it with "
        'mode="rw", or clone() the view'
    )


def _refused(name: str) -> Callable[..., Any]:
    def refuse(view: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(f"{name} may write", view)

    return refuse


for _name in ("as_subclass", "map2_", "map_", "set_"):  # torch does not dispatch these
    setattr(ReadOnlyView, _name, _refused(_name))


class _ReadOnlyStorage(torch.UntypedStorage):
    """The storage of a view for reading: to be looked at and compared."""

    tiered_key: str

    def data_ptr(self) -> int:
        return address_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(self))


for _name in ("__setitem__", "byteswap", "copy_", "fill_", "resize_", "share_memory_"):
    setattr(_ReadOnlyStorage, _name, _refused(f"storage.{_name}"))


def _guard(result: Any, views: list[ReadOnlyView]) -> Any:
    """Return ``result`` with each tensor that shares bytes with ``views`` made read-only."""
    if isinstance(result, ReadOnlyView):
        return result
    if isinstance(result, torch.Tensor):
        if is_functorch_wrapped_tensor(result):  # it has no bytes to be told by
            return result
        for view in views:
            if result.layout is torch.strided and storage_address(result) == storage_address(view):
                _make_read_only(result, view.__dict__.get("tiered_key", ""))
                break
        return result
    if type(result) in (list, tuple):
        return type(result)(_guard(item, views) for item in result)
    return result
