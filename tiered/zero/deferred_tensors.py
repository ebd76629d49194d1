"""DeferredTensor: a tensor whose values are read when they are wanted, and the torch operations on it until then.

DeferredFiles gives the tensors of safetensors files so: each is read past the page cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tiered.bytes.file_stream import FileReader
from tiered.errors import UsageError
from tiered.store.format.safetensors_header import HeaderEntry, SafetensorsHeader, read_header
from tiered.zero.parameters.parameter import is_in_place

__all__ = ["DeferredFiles", "DeferredTensor", "safetensors_files"]

_ITSELF: set[Any] = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_MOVES: set[Any] = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


class DeferredTensor(torch.Tensor):
    """A meta tensor with a recipe for its values. An operation on some gives another, whose recipe is the operation.

    ``values()`` follows the recipe, and keeps nothing. ``place`` is (file, name) where the values are a tensor of that
    safetensors file as it is, else None. Copies between devices are left out: values are in DRAM.
    """

    place: tuple[str, str] | None
    _read: Callable[[], torch.Tensor]
    _read_into: Callable[[torch.Tensor, int], Callable[[], None]] | None

    @classmethod
    def of(
        cls,
        looks: torch.Tensor,
        read: Callable[[], torch.Tensor],
        *,
        read_into: Callable[[torch.Tensor, int], Callable[[], None]] | None = None,
        place: tuple[str, str] | None = None,
    ) -> DeferredTensor:
        """Return one that looks like ``looks``, on meta. ``read_into`` starts to fill one, or a part of it.

        It takes a contiguous tensor in DRAM of this dtype and the element that it begins at, and returns the call that
        waits for the values.
        """
        with torch._C.DisableTorchFunctionSubclass():
            deferred = torch.Tensor._make_subclass(cls, looks.detach().to("meta"))
        deferred._read, deferred._read_into, deferred.place = read, read_into, place
        return deferred

    def begin_copy(self, target: torch.Tensor) -> Callable[[], None] | None:
        """Start to copy the values to ``target``, which is of this shape; return the call that waits, if any."""
        is_same = target.dtype == self.dtype and target.is_contiguous() and target.is_cpu
        if self._read_into is not None and is_same and target.numel():
            return self._read_into(target, 0)
        values = self.values()
        with torch.no_grad():
            target.copy_(values)
        return None

    def copy_part(self, first: int, target: torch.Tensor) -> None:
        """Copy elements [first, first + numel) in the order of a contiguous tensor to ``target``, (numel,); blocks."""
        if self._read_into is None:
            target.copy_(self.values().reshape(-1)[first : first + target.numel()])
        else:
            part = target if target.dtype == self.dtype else torch.empty(target.shape, dtype=self.dtype, device="cpu")
            self._read_into(part, first)()
            if part is not target:
                target.copy_(part)

    def values(self) -> torch.Tensor:
        """Return the values, an ordinary tensor in DRAM of these looks; blocks where they are read."""
        return self._read()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and not isinstance(args[0], cls):
            source: DeferredTensor = args[1]
            wait = source.begin_copy(args[0])
            if wait is not None:
                wait()
            return args[0]
        if _changes_nothing(func, args, kwargs):
            same: DeferredTensor = args[0]
            return cls.of(same, same._read, read_into=same._read_into, place=same.place)
        if func in _ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if is_in_place(func) or "out" in kwargs:
            raise UsageError(f"{getattr(func, '__name__', func)} would write to a tensor that was not read yet")
        with torch._C.DisableTorchFunctionSubclass():
            looks = _moved(args, kwargs) if func in _MOVES else func(*args, **kwargs)
        return _deferred(looks, lambda: _run(func, args, kwargs))


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``func`` gives the values of its first argument as they are."""
    if not args or not isinstance(args[0], DeferredTensor):
        return False
    if func is torch.Tensor.__getitem__:
        return args[1] is Ellipsis
    if func in _MOVES:
        return _dtype_of(args, kwargs) == args[0].dtype
    return func is torch.Tensor.detach or (func is torch.Tensor.contiguous and args[0].is_contiguous())


def _deferred(looks: Any, compute: Callable[[], Any]) -> Any:
    """Return what an operation gives, with the tensors in it deferred."""
    if isinstance(looks, torch.Tensor):
        return DeferredTensor.of(looks, compute) if looks.is_meta else looks
    if isinstance(looks, list | tuple) and any(isinstance(each, torch.Tensor) for each in looks):
        return type(looks)([_deferred(each, lambda n=n: compute()[n]) for n, each in enumerate(looks)])  # type: ignore[misc]
    return looks


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out an operation on values."""
    args, kwargs = tree_map(lambda each: each.values() if isinstance(each, DeferredTensor) else each, (args, kwargs))
    if func in _MOVES:
        return args[0].to(_dtype_of(args, kwargs))
    with torch.no_grad():
        return func(*args, **kwargs)


def _moved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(args[0], dtype=_dtype_of(args, kwargs), device="meta", requires_grad=False)


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the dtype that ``args[0].to(...)`` gives."""
    first: torch.Tensor = args[0]
    if len(args) > 1 and isinstance(args[1], torch.Tensor):
        return args[1].dtype
    _, dtype, _, _ = torch._C._nn._parse_to(*args[1:], **{k: v for k, v in kwargs.items() if k != "copy"})
    return dtype or first.dtype


# -- files -------------------------------------------------------------------------------------------------------------


_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


class DeferredFiles:
    """Files whose headers were read; one of them is open at a time. Tensors may be read until ``close``."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers; blocks. Raises UsageError for a file that is no sound one, DeviceError."""
        self._headers: list[SafetensorsHeader] = [read_header(path) for path in paths]
        self._paths = [str(path) for path in paths]
        self._reader: FileReader | None = None

    def tensors(self) -> dict[str, DeferredTensor]:
        """Return all tensors by name. Raises UsageError for one of a dtype that torch lacks, and one in two files."""
        found: dict[str, DeferredTensor] = {}
        for path, header in zip(self._paths, self._headers, strict=True):
            for name in header.entries:
                if name in found:
                    raise UsageError(
                        f"{name} is in {path}, and in another file beside it: which of them is meant? Expected each"
                        " tensor in one; name the files that belong together"
                    )
                entry = header.entry(name)
                looks = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
                read_into = partial(self._read_into, path, entry)
                found[name] = DeferredTensor.of(
                    looks, partial(_read, read_into, looks), read_into=read_into, place=(path, name)
                )
        return found

    def _read_into(self, path: str, entry: HeaderEntry, target: torch.Tensor, first: int) -> Callable[[], None]:
        """Start to fill ``target``, contiguous in DRAM and of the dtype of ``entry``, from element ``first`` on.

        Returns the call that waits.
        """
        if self._reader is None or self._reader.path != path:
            self.close()
            self._reader = FileReader(path)
        memory: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
        return self._reader.begin(entry.offset + first * target.element_size(), memoryview(memory))

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _read(read_into: Callable[[torch.Tensor, int], Callable[[], None]], looks: torch.Tensor) -> torch.Tensor:
    values = torch.empty(looks.shape, dtype=looks.dtype, device="cpu")
    read_into(values, 0)()
    return values


def safetensors_files(source: str | Path, what: str) -> list[Path]:
    """Return the files that ``source`` names: a file, or those of a folder; where it has an index, those of that.

    Raises UsageError, which names the argument ``what``, where there is none.
    """
    path = Path(source)
    index, is_whole = path / _INDEX, (path / "model.safetensors").is_file()
    if index.is_file() and not is_whole:
        try:
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{what}: {index} is no index of safetensors files ({error!r}); get it again") from error
        found = [path / Path(name).name for name in names]
        found += sorted({*path.glob("adapter_model*.safetensors")} - {*found})  # an index does not name them
    elif path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if is_whole:  # shards beside it are another checkpoint's: transformers leaves them out, too
            found = [each for each in found if not _SHARD.fullmatch(each.name)]
        found += [each for each in _all_shards(found) if each not in found]
    else:
        found = [path]
    missing = [each for each in found if not each.is_file()]
    if missing or not found:
        lacking = f"it lacks {missing[0].name}" if missing and path.is_dir() else "no safetensors file there"
        others = sorted(each.name for each in path.glob("*") if each.suffix in (".bin", ".pt", ".pth", ".ckpt", ".npz"))
        hint = f", or the tensors of {others[0]}: torch.load(FILE, mmap=True, weights_only=True)" if others else ""
        raise UsageError(f"{what}{str(source)!r}: {lacking}; expected files or a folder of them{hint}")
    return found


def _all_shards(found: Sequence[Path]) -> list[Path]:
    """Return the files that belong to the shards among ``found``, whose names say how many there are."""
    counts = {int(match[1]): path for path in found if (match := _SHARD.fullmatch(path.name))}
    return [
        path.with_name(f"model-{number + 1:05d}-of-{count:05d}.safetensors")
        for count, path in counts.items()
        for number in range(count)
    ]
