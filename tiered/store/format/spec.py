"""Spec: the looks of a tensor, as a caller has it and as a catalog row names it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch

from tiered.errors import CorruptionError, UsageError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import Row

__all__ = ["Spec", "UnknownSpec", "is_kept"]

_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_KEPT = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)} - _QUANTISED
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _KEPT}


def is_kept(dtype: torch.dtype | str) -> bool:
    """Whether a store keeps tensors of ``dtype``, given as itself or by the name that catalog rows have."""
    return dtype in _DTYPES if isinstance(dtype, str) else dtype in _KEPT


@dataclass(frozen=True, slots=True)
class Spec:
    """The looks of a tensor: its dtype and shape, and the bytes of it that are kept under one digest."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    block_nbytes: int = BLOCK_NBYTES
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)

    @property
    def dtype_name(self) -> str:
        """The dtype as catalog rows have it."""
        return str(self.dtype).removeprefix("torch.")

    @classmethod
    def like(cls, tensor: torch.Tensor, block_nbytes: int = BLOCK_NBYTES) -> Spec:
        """Return the spec of ``tensor``."""
        return _spec(tensor.dtype, tuple(tensor.shape), block_nbytes)

    @classmethod
    def of(cls, row: Row) -> Spec:
        """Return the spec a catalog row names. Raises CorruptionError when the row contradicts itself."""
        spec = _spec_named(row.dtype, row.shape, row.block_nbytes) or UnknownSpec(row)
        problem = ""
        if spec.nbytes != row.nbytes:
            problem = f"{row.nbytes} bytes for shape {row.shape} of {row.dtype}"
        if problem:
            raise CorruptionError(f"the catalog row of {row.name!r} has {problem}", key=row.name)
        return spec


class UnknownSpec(Spec):
    """The spec of a row with a dtype of a newer torch. It has all facts of a tensor but the dtype itself."""

    __slots__ = ("_row",)

    _row: Row

    def __init__(self, row: Row) -> None:
        object.__setattr__(self, "shape", row.shape)
        object.__setattr__(self, "block_nbytes", row.block_nbytes)
        object.__setattr__(self, "nbytes", row.nbytes)
        object.__setattr__(self, "_row", row)

    @property
    def dtype(self) -> torch.dtype:
        """Raise UsageError: the caller is about to make a tensor."""
        raise self.refusal()

    def refusal(self) -> UsageError:
        """Return the error for a caller that wants the tensor."""
        return UsageError(
            f"{self._row.name!r} has a dtype that this torch does not know: {self._row.dtype!r}, this is torch "
            f"{torch.__version__}; open the store with the torch that wrote it. Its other keys can be used"
        )

    @property
    def dtype_name(self) -> str:
        """The dtype as the catalog row has it."""
        return self._row.dtype


@functools.lru_cache(maxsize=1024)  # of a million keys, most look alike
def _spec(dtype: torch.dtype, shape: tuple[int, ...], block_nbytes: int) -> Spec:
    return Spec(dtype, shape, block_nbytes)


@functools.lru_cache(maxsize=1024)
def _spec_named(dtype_name: str, shape: tuple[int, ...], block_nbytes: int) -> Spec | None:
    dtype = _DTYPES.get(dtype_name)
    return None if dtype is None else Spec(dtype, shape, block_nbytes)
