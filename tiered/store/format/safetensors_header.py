"""SafetensorsHeader: the names, dtypes, shapes and places of the tensors of a safetensors file, read strictly.

A file is a length (8 bytes, little-endian), a header of so many bytes of JSON, and the tensors' bytes without a gap.
The file is the user's: all that is wrong with it is a UsageError that names it. No byte of a tensor is read here.
"""

from __future__ import annotations

import difflib
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeGuard

from tiered.bytes.device.external_files import absolute_paths, open_regular
from tiered.bytes.device.files import translate
from tiered.errors import UsageError
from tiered.store.format.checksum import digest
from tiered.units import KiB, round_up

__all__ = ["DTYPE_NAMES", "HeaderEntry", "SafetensorsHeader", "parse_header", "read_header"]

_LENGTH_NBYTES = 8
_MOST_NBYTES = 100_000_000  # of a header; the format's own bound
_READ_NBYTES = 64 * KiB  # direct I/O wants such lengths; most headers are read at once
_MOST_NUMBER = 2**63 - 1  # of a dimension, an offset or a number of bytes
_MOST_DIMS = 1000  # so that the product of a shape takes no long arithmetic
_MOST_SHOWN = 120  # letters of a name in a message
_LOADED = "give its tensors: torch.load(FILE, mmap=True, weights_only=True), or of numpy a dict by torch.from_numpy"
_DTYPES = {  # the format's name: torch's name, bytes of an element
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F4": ("float4_e2m1fn_x2", 1),  # the format counts halves of such an element; see ``_entry``
}

_OTHER_KINDS = (  # first bytes, what such a file is, the way on
    (b"version https://git-lfs", "a pointer of Git LFS", "run `git lfs pull` in its repository"),
    (b"<", "a web page", "download the file itself"),
    (b"GGUF", "a GGUF file", "get the checkpoint that it was made from"),
    (b"\x89HDF", "an HDF5 file", "give its tensors, as a dict"),
    (b"PK\x03\x04", "a zip archive, as torch.save and numpy.savez write", _LOADED),
    (b"\x80", "a pickle, as old torch.save writes", _LOADED),
)

DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}
"""The format's name of a dtype, by torch's."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a file: its looks, and the place of its bytes."""

    dtype: str  # torch's name, such as "bfloat16"; the file's own where ``is_known`` is False, such as "F6_E2M3"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file; not aligned
    nbytes: int
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The tensors of one file by name, in the order of their bytes."""

    path: str
    nbytes: int  # of the length and the header: the tensors' bytes begin there
    digest: int  # xxh3-64 of these
    entries: Mapping[str, HeaderEntry]

    def entry(self, name: str) -> HeaderEntry:
        """Return the entry of ``name``. Raises UsageError where there is none, or where its dtype is unknown."""
        entry = self.entries.get(name)
        if entry is None:
            similar = difflib.get_close_matches(name, self.entries, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; it has {len(self.entries)} tensors"
            raise UsageError(f"{self.path} has no tensor {_shown(name)}{hint}")
        if not entry.is_known:
            raise UsageError(
                f"{self.path}: {_shown(name)} has the dtype {_shown(entry.dtype)}, which torch lacks: "
                f"convert it to one of {', '.join(_DTYPES)}"
            )
        return entry


def read_header(path: str | os.PathLike[str], fd: int | None = None) -> SafetensorsHeader:
    """Return the header of the safetensors file ``path``, or of ``fd``, on which it is open with or without O_DIRECT.

    Blocks for one or two reads. Raises UsageError where the file cannot be opened or breaks a rule of the format, and
    DeviceError where the drive fails.
    """
    (name,) = absolute_paths([path])
    opened = open_regular(name) if fd is None else fd
    try:
        file_nbytes = os.fstat(opened).st_size
        head = _read(opened, _LENGTH_NBYTES, file_nbytes)
        end = _header_end(head, file_nbytes, name)
        content = head if len(head) >= end else _read(opened, end, file_nbytes)
        return parse_header(content, file_nbytes, name)
    except OSError as error:
        raise translate(error, f"cannot read the header of {name}") from error
    finally:
        if fd is None:
            os.close(opened)


def parse_header(content: bytes, file_nbytes: int, path: str) -> SafetensorsHeader:
    """Return the header that ``content`` begins with, of the file ``path``, which is ``file_nbytes`` long.

    Raises UsageError for the first broken rule of the format.
    """
    end = _header_end(content, file_nbytes, path)
    if len(content) < end:
        raise _broken(path, f"it ends after {len(content)} bytes, within its header of {end}")
    entries = [
        (name, _entry(name, value, end, path))
        for name, value in _json(content[_LENGTH_NBYTES:end], path).items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    place = end
    for name, entry in entries:
        if entry.offset != place:
            relation = "overlaps the tensor before it" if entry.offset < place else "comes after a gap"
            raise _broken(path, f"{_shown(name)} begins at byte {entry.offset} and {relation}, which ends at {place}")
        place += entry.nbytes
    if place != file_nbytes:
        raise _broken(path, f"its tensors end at byte {place}, and it has {file_nbytes} bytes")
    return SafetensorsHeader(path, end, digest(content[:end], 0), MappingProxyType(dict(entries)))


def _read(fd: int, nbytes: int, file_nbytes: int) -> bytes:
    """Return at least ``nbytes`` from the start of the file, or all of it. Raises OSError."""
    nbytes = round_up(nbytes, _READ_NBYTES)
    with mmap.mmap(-1, nbytes) as pages:  # aligned, in case that the descriptor is for direct I/O
        num_read = os.preadv(fd, [pages], 0)
        return pages[: min(num_read, file_nbytes)]


def _header_end(content: bytes, file_nbytes: int, path: str) -> int:
    """Return where the header ends, as its length at the start of ``content`` says."""
    if len(content) < _LENGTH_NBYTES:
        raise _broken(path, f"it has {len(content)} bytes, too few for the length of a header")
    nbytes = int.from_bytes(content[:_LENGTH_NBYTES], "little")
    if _LENGTH_NBYTES + nbytes > min(file_nbytes, _MOST_NBYTES):
        for first_bytes, kind, way in _OTHER_KINDS:
            if content.startswith(first_bytes):
                raise UsageError(f"{path} is no safetensors file but {kind}: {way}")
    if nbytes > _MOST_NBYTES:
        raise _broken(path, f"its header would have {nbytes} bytes, and {_MOST_NBYTES} are the most")
    if _LENGTH_NBYTES + nbytes > file_nbytes:
        raise _broken(path, f"its header would have {nbytes} bytes, and the file has {file_nbytes}")
    return _LENGTH_NBYTES + nbytes


def _json(text: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object ``text``, which names nothing twice."""
    if not text.startswith(b"{"):
        raise _broken(path, f"its header begins with {text[:1]!r}, and not with b'{{'")
    try:
        header: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise _broken(path, "its header is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError too
        raise _broken(path, f"its header is no JSON: {error}") from error
    return header


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it names {_shown(name)} twice")
        found[name] = value
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _entry(name: str, value: Any, data_start: int, path: str) -> HeaderEntry:
    """Return the entry that ``value`` of the header describes."""
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise _broken(path, f"the name {_shown(name)} is no text")
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str):
        raise _broken(path, f"{_shown(name)} must have one dtype, shape and data_offsets")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise _broken(path, f"{_shown(name)} must have a shape of counts and data_offsets from a start to an end")
    start, end = offsets
    if dtype == "F4" and shape and shape[-1] % 2 == 0:
        shape = [*shape[:-1], shape[-1] // 2]  # torch has two in an element
    elif dtype == "F4":
        dtype = "F4 of an odd last dimension"
    torch_name, itemsize = _DTYPES.get(dtype, (dtype, None))
    if itemsize is not None and math.prod(shape) * itemsize != end - start:
        raise _broken(path, f"{_shown(name)} has {end - start} bytes, which are not those of {dtype} and its shape")
    return HeaderEntry(torch_name, tuple(shape), data_start + start, end - start, is_known=itemsize is not None)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= _MOST_DIMS and all(map(_is_count, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER


def _broken(path: str, what: str) -> UsageError:
    return UsageError(f"{path} is no sound safetensors file: {what}; get it again, or name another")


def _shown(text: str) -> str:
    """Return ``text`` as a message has it: a hostile header may make it long, or of letters that cannot be printed."""
    shown = ascii(text)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
