"""DeferredFiles: the tensors of safetensors files, deferred: each is read past the page cache when it is wanted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tiered.bytes.file_stream import FileReader
from tiered.errors import UsageError
from tiered.store.format.safetensors_header import HeaderEntry, SafetensorsHeader, read_header
from tiered.zero.deferred_tensor import DeferredTensor

__all__ = ["DeferredFiles", "safetensors_files"]

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

    def _read_into(self, path: str, entry: HeaderEntry, target: torch.Tensor) -> Callable[[], None]:
        """Start to fill ``target``, contiguous in DRAM and of the looks of ``entry``; return the call that waits."""
        if self._reader is None or self._reader.path != path:
            self.close()
            self._reader = FileReader(path)
        memory: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
        return self._reader.begin(entry.offset, memoryview(memory))

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _read(read_into: Callable[[torch.Tensor], Callable[[], None]], looks: torch.Tensor) -> torch.Tensor:
    values = torch.empty(looks.shape, dtype=looks.dtype, device="cpu")
    read_into(values)()
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
