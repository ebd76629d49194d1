"""A folder of safetensors files as transformers lays it out: one file, or shards with an index; replaced as a whole.

A file is written a tensor at a time: header first, no more than a few pieces in memory. The safetensors library writes
what lies in memory whole; so the writer is this room's own, the readers are theirs.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tiered.bytes.device.files import translate
from tiered.bytes.file_stream import PIECE_NBYTES, FileWriter
from tiered.bytes.private_file import fsync_directory, lock_owner
from tiered.errors import UsageError
from tiered.store.format.safetensors_header import DTYPE_NAMES
from tiered.units import parse_bytes, round_up
from tiered.zero.deferred_tensors import DeferredTensor

__all__ = ["holds_checkpoint", "write_checkpoint", "write_files"]

_log = logging.getLogger("tiered")

_PARTIAL = ".tiered-partial"
"""The start of the name of a folder in the folder, with all that a save or an export has not finished."""

_LENGTH_NBYTES = 8
_ALIGNMENT = 4096  # of the first tensor: so whoever reads the file past the page cache copies less


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_size: int | str,
    write_others: Callable[[Path], object] | None = None,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> list[Path]:
    """Write ``tensors``, deferred ones among them, to ``folder``, and return the files' paths; blocks till durable.

    ``write_others(temporary)`` writes what else belongs there, such as a config.json, to a folder beside. ``metadata``
    goes into the header of each file.

    The new files take their names when all of them are durable; then the old ones go. A crash leaves the earlier
    checkpoint or none, never parts of two, and temporary files, which the next call removes. Raises ValueError for a
    size; UsageError, before anything is written, while another call writes to ``folder``, in any process of this
    machine, and for a file that a store reads in place; what writing a tensor raises, with the earlier checkpoint
    as it was.
    """
    shards = _split(tensors, parse_bytes(max_shard_size))
    with _prepared(folder, shards) as temporary:
        for name, names in shards.items():
            content = {each: tensors[each] for each in names}
            _write_safetensors(temporary / name, content, {"format": "pt", **metadata})
        index = _index(tensors, shards) if len(shards) > 1 else None
        _write_others(temporary, write_others, index)
        _publish(folder, temporary, shards, is_sharded=index is not None)
    return [folder / name for name in shards]


def write_files(folder: Path, write: Callable[[Path], object]) -> None:
    """Have ``write(temporary)`` write files to a folder beside, then give each its name in ``folder``; blocks.

    Each file is there whole, the new one or the earlier one, also after a crash. Raises UsageError as above.
    """
    with _prepared(folder, ()) as temporary:
        _write_others(temporary, write, None)
        _move_others(folder, temporary)


@contextmanager
def _prepared(folder: Path, shards: Iterable[str]) -> Iterator[Path]:
    """Lock ``folder``, and the files that ``shards`` are to replace; lend a folder in it for temporary files.

    No temporary file stays, of an earlier call or of this one where it fails; nor a new folder.
    """
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(_locked(folder, _FOLDER_REFUSAL))
            stack.enter_context(_held(folder, {*shards, *_weight_files(folder)} if shards else ()))
            _remove_partial(folder)
            if is_new:
                stack.callback(_remove_empty, folder)
            stack.callback(_remove_partial, folder)
            yield Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    except FileExistsError as error:
        raise UsageError(f"{folder} is a file; expected a folder, or a path where there is none") from error
    except OSError as error:
        raise translate(error, f"cannot write the checkpoint to {folder}") from error


_FOLDER_REFUSAL = "is being written to by another save or export{}: wait for its end, or name another folder"


@contextmanager
def _held(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Keep every store from opening the files of ``folder`` that are about to go; UsageError where one has one open."""
    with ExitStack() as stack:
        for name in sorted(names):
            with suppress(OSError):  # such as one that is missing
                stack.enter_context(
                    _locked(
                        folder / name,
                        "is read in place, as an external file, by a store that is open{}: its committed run could not"
                        " be opened again without that file; save to another folder",
                    )
                )
        yield


@contextmanager
def _locked(path: Path, refusal: str) -> Iterator[None]:
    """Lock ``path`` against every other lock; where there is one, raise UsageError with ``refusal``."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDWR | flags)  # which NFS wants for a lock
    except OSError:
        fd = os.open(path, os.O_RDONLY | flags)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = lock_owner(fd)
            raise UsageError(f"{path} {refusal.format(f' in process {owner}' if owner else '')}") from error
        except OSError as error:
            _log.warning("%s cannot be locked (%s): nothing keeps others from it meanwhile", path, error.strerror)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # also the lock of a child that was forked meanwhile
        os.close(fd)


def _split(tensors: Mapping[str, torch.Tensor], most_nbytes: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file, as transformers deals them out.

    They come in their order; a file ends before it would exceed the size, and a tensor above the size has its own.
    """
    shards: list[list[str]] = []
    names: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        each = tensor.numel() * tensor.dtype.itemsize
        if each > most_nbytes:
            shards.append([name])
            continue
        if nbytes + each > most_nbytes:
            shards.append(names)
            names, nbytes = [], 0
        names.append(name)
        nbytes += each
    if names or not shards:
        shards.append(names)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards)}


def _index(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, list[str]]) -> dict[str, Any]:
    nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    total = {"total_parameters": sum(tensor.numel() for tensor in tensors.values()), "total_size": nbytes}
    return {"metadata": total, "weight_map": {name: file for file, names in shards.items() for name in names}}


def holds_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` holds files that ``write_checkpoint`` would replace."""
    return folder.is_dir() and bool(_weight_files(folder))


def _weight_files(folder: Path) -> set[str]:
    """Return the names of the files of a checkpoint that is there."""
    pattern = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
    return {entry.name for entry in folder.iterdir() if pattern.fullmatch(entry.name)}


def _write_others(temporary: Path, write: Callable[[Path], object] | None, index: dict[str, Any] | None) -> None:
    """Write the small files to a folder in ``temporary``, and make them durable."""
    others = temporary / _OTHERS
    others.mkdir()
    if write is not None:
        write(others)
    if index is not None:
        (others / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in _files(others):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


_INDEX = "model.safetensors.index.json"
_OTHERS = "others"  # beside the shards, whose names end otherwise


def _publish(folder: Path, temporary: Path, shards: Mapping[str, list[str]], *, is_sharded: bool) -> None:
    """Give the new files their names, then remove the old ones.

    transformers takes model.safetensors before an index. So until the last old file goes, or the new index comes, it
    reads the old checkpoint; where shards have the names of old ones, it finds no index meanwhile, and those that go by
    the names of the shards find too few, until all are new.
    """
    before = _weight_files(folder)
    if before & shards.keys() and is_sharded:
        (folder / _INDEX).unlink(missing_ok=True)
        fsync_directory(folder)
        for name in sorted(before & shards.keys()):
            (folder / name).unlink()
        fsync_directory(folder)
    for name in shards:
        os.replace(temporary / name, folder / name)
    fsync_directory(folder)  # order: the index names files that are there
    _move_others(folder, temporary)
    for name in before - shards.keys() - ({_INDEX} if is_sharded else set()):
        (folder / name).unlink(missing_ok=True)
    fsync_directory(folder)


def _move_others(folder: Path, temporary: Path) -> None:
    """Give the small files their names. Raises UsageError, before one has it, where a store reads such a file."""
    others = temporary / _OTHERS
    names = [path.relative_to(others) for path in _files(others)]
    with _held(folder, map(str, names)):
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(others / name, target)
            fsync_directory(target.parent)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _remove_partial(folder: Path) -> None:
    """Remove what a save or an export did not finish. Order: under the lock of ``folder``, so it is nobody's."""
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # what was written is in it
        folder.rmdir()


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
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
    """Yield the values of ``tensor`` in their order: the tensor itself where it is contiguous, else copies of rows."""
    if tensor.is_contiguous():
        yield tensor
        return
    num_rows = max(1, PIECE_NBYTES * tensor.shape[0] // tensor.nbytes)
    for rows in torch.split(tensor, num_rows):
        yield rows.contiguous()
