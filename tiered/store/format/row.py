"""The rows of a catalog: their fields, and their bytes.

The layout is on the first screen of ``catalog.py``. Decoding trusts nothing: a field is used only after it has been
seen to lie inside the bytes that there are, and a row only after its digest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tiered.errors import CorruptionError, UsageError
from tiered.store.format.checksum import DIGEST_NBYTES, digest, num_blocks
from tiered.store.format.extent import Extent

__all__ = [
    "EXTENT_NBYTES",
    "FORMAT_VERSION",
    "MAX_NUM_DIMS",
    "ROOT_HEADER_NBYTES",
    "ROW_HEADER_NBYTES",
    "Root",
    "RootHeader",
    "Row",
    "corrupt",
    "decode_root",
    "decode_root_header",
    "decode_row",
    "encode_root",
    "encode_row",
    "place_problem",
    "refuse_newer",
    "row_problem",
    "row_seed",
    "unpack_header",
]

FORMAT_VERSION = 1

_LIMIT = 1 << 63  # every integer of the format is below this: it fits SQLite, torch and off_t
_ROOT = struct.Struct("<16sQQIQQ")
_ROW = struct.Struct("<QQIIBBB")
_EXTENT = struct.Struct("<HIQQ")
_MASK = (1 << 64) - 1

MAX_NUM_DIMS = 255
"""How many dimensions a row has room for: their number is one byte."""

ROOT_HEADER_NBYTES = _ROOT.size
"""How many bytes at the start of the root row's body hold all but the state."""

ROW_HEADER_NBYTES = _ROW.size
"""How many bytes at the start of a row's body have a fixed place."""

EXTENT_NBYTES = _EXTENT.size
"""Bytes of one extent in a row."""

unpack_header = _ROW.unpack_from
"""Return generation, nbytes, and the numbers of name bytes, extents, dtype bytes, dimensions, and inline (0 or 1)."""


@dataclass(frozen=True, slots=True)
class Row:
    """The facts about one key in the catalog.

    ``generation`` is the one that the bytes were written for; with the key id it seeds the digests. A tensor of at
    most 1 KiB may live in ``inline``; it then has neither extents nor digests.
    """

    key_id: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    generation: int
    extents: tuple[Extent, ...]
    digests: bytes  # 8 per block of 4 MiB, little-endian
    inline: bytes | None


@dataclass(frozen=True, slots=True)
class Root:
    """The facts about a generation of the whole store, apart from its rows."""

    store_uuid: bytes  # 16 bytes
    generation: int
    next_key_id: int
    num_directories: int
    state: str  # JSON text of everything that rides along with the commit


@dataclass(frozen=True, slots=True)
class RootHeader:
    """The root row without the state: facts about the store, and the number and sum of the rows."""

    store_uuid: bytes
    generation: int
    next_key_id: int
    num_directories: int
    num_rows: int
    digest_sum: int  # modulo 2**64


def encode_row(row: Row, store_uuid: bytes) -> tuple[bytes, bytes]:
    """Return the body and the digest of ``row``; ValueError for a row that the format does not allow."""
    problem = row_problem(row)
    if problem is not None:
        raise ValueError(f"row of {row.name!r} (key id {row.key_id}): {problem}")
    name = row.name.encode("utf-8", "surrogatepass")
    dtype = row.dtype.encode("ascii")
    content = row.digests if row.inline is None else row.inline
    body = b"".join(
        (
            _ROW.pack(
                row.generation,
                row.nbytes,
                len(name),
                len(row.extents),
                len(dtype),
                len(row.shape),
                row.inline is not None,
            ),
            name,
            dtype,
            struct.pack(f"<{len(row.shape)}Q", *row.shape),
            *(_EXTENT.pack(*extent) for extent in row.extents),
            content,
        )
    )
    return body, _row_digest(row.key_id, body, row_seed(store_uuid))


def encode_root(root: Root, num_rows: int, digest_sum: int) -> tuple[bytes, bytes]:
    """Return the body and the digest of the root row."""
    if len(root.store_uuid) != 16 or not 0 <= root.generation < _LIMIT or not 0 < root.next_key_id < _LIMIT:
        raise ValueError(f"root row out of range: {root.store_uuid!r}, {root.generation}, {root.next_key_id}")
    header = _ROOT.pack(
        root.store_uuid, root.generation, root.next_key_id, root.num_directories, num_rows, digest_sum & _MASK
    )
    body = header + root.state.encode("utf-8", "surrogatepass")
    return body, _root_digest(body)


def decode_root_header(body: bytes, file: str) -> RootHeader:
    """Return the facts of the first ``ROOT_HEADER_NBYTES`` of a root row's body."""
    if len(body) < _ROOT.size:
        raise corrupt(f"the root row has {len(body)} bytes, expected at least {_ROOT.size}", file)
    return RootHeader(*_ROOT.unpack_from(body))


def decode_root(body: bytes, expected: bytes, file: str) -> tuple[Root, RootHeader]:
    """Return the root row, checked. Raises CorruptionError that names ``file``."""
    header = decode_root_header(body, file)
    if _root_digest(body) != expected:
        raise corrupt("the root row does not match its digest", file)
    if max(header.generation, header.next_key_id) >= _LIMIT or not header.next_key_id or not header.num_directories:
        raise corrupt("the root row holds numbers that no store writes", file)
    try:
        state = body[_ROOT.size :].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise corrupt("the state in the root row is not text", file) from error
    root = Root(header.store_uuid, header.generation, header.next_key_id, header.num_directories, state)
    return root, header


def refuse_newer(file_version: int, root_version: int, file: str) -> None:
    """Raise UsageError where both places that hold the format version name a newer one; CorruptionError if they differ.

    These two places stay the same in every version.
    """
    if file_version != root_version or not 0 < file_version < 1 << 31:
        raise corrupt(f"it gives its format version as {file_version} and as {root_version}", file)
    if file_version != FORMAT_VERSION:
        raise UsageError(
            f"{file} has format version {file_version}; this tiered reads version {FORMAT_VERSION}: "
            "open it with the version of tiered that wrote it"
        )


def decode_row(encoded: bytes) -> Row:
    """Return the row of a key id (u64) and the body that follows it. Raises ValueError or struct.error."""
    key_id, body = int.from_bytes(encoded[:8], "little"), encoded[8:]
    generation, nbytes, name_nbytes, num_extents, dtype_nbytes, num_dims, inline = _ROW.unpack_from(body)
    content_nbytes = nbytes if inline else DIGEST_NBYTES * num_blocks(nbytes)
    dtype_at = _ROW.size + name_nbytes
    shape_at = dtype_at + dtype_nbytes
    extents_at = shape_at + 8 * num_dims
    content_at = extents_at + _EXTENT.size * num_extents
    # Everything that is built below is cut from the body: no number in it can ask for more than it holds.
    if inline > 1 or content_at + content_nbytes != len(body):
        raise ValueError(f"it has {len(body)} bytes, its fields need {content_at + content_nbytes}")
    content = body[content_at:]
    return Row(
        key_id,
        body[_ROW.size : dtype_at].decode("utf-8", "surrogatepass"),
        body[dtype_at:shape_at].decode("ascii"),
        struct.unpack_from(f"<{num_dims}Q", body, shape_at),
        nbytes,
        generation,
        tuple(map(Extent._make, _EXTENT.iter_unpack(body[extents_at:content_at]))),
        b"" if inline else content,
        content if inline else None,
    )


def row_problem(row: Row) -> str | None:
    """Return what is wrong with ``row`` by itself, or None."""
    if not 0 < row.key_id < _LIMIT or not 0 <= row.generation < _LIMIT or not 0 <= row.nbytes < _LIMIT:
        return f"key id, generation or size out of range ({row.generation}, {row.nbytes} bytes)"
    if len(row.shape) > MAX_NUM_DIMS:
        return f"{len(row.shape)} dimensions"
    if any(not 0 <= dim < _LIMIT for dim in row.shape):
        return f"a shape of {row.shape}"
    if row.inline is not None:
        fits = len(row.inline) == row.nbytes and not row.extents and not row.digests
        return None if fits else f"{len(row.inline)} bytes inline for {row.nbytes}, with extents or digests"
    if len(row.digests) != DIGEST_NBYTES * num_blocks(row.nbytes):
        return f"{len(row.digests)} bytes of digests for {num_blocks(row.nbytes)} blocks"
    if any(e.nbytes <= 0 or e.offset < 0 or e.offset + e.nbytes >= _LIMIT or e.file < 0 for e in row.extents):
        return "an extent that is no range of a named file"
    if sum(e.nbytes for e in row.extents) < row.nbytes:
        return f"extents of {sum(e.nbytes for e in row.extents)} bytes for {row.nbytes}"
    return None


def place_problem(row: Row, header: RootHeader) -> str | None:
    """Return the contradiction between ``row`` and the root, or None."""
    if row.key_id >= header.next_key_id:
        return f"the next key id is {header.next_key_id}"
    if row.generation > header.generation:
        return f"written for generation {row.generation}, committed is {header.generation}"
    if any(extent.device >= header.num_directories for extent in row.extents):
        return f"an extent outside the store's {header.num_directories} directories"
    return None


def row_seed(store_uuid: bytes) -> int:
    """Return the seed of the digests of a store's rows."""
    return xxhash.xxh3_64_intdigest(store_uuid)


def _row_digest(key_id: int, body: bytes, seed: int) -> bytes:
    return digest(key_id.to_bytes(8, "little") + body, seed).to_bytes(DIGEST_NBYTES, "little")


def _root_digest(body: bytes) -> bytes:
    return digest(FORMAT_VERSION.to_bytes(4, "little") + body, 0).to_bytes(DIGEST_NBYTES, "little")


def corrupt(what: str, file: str, key: str = "") -> CorruptionError:
    """Return the error for a catalog that is damaged."""
    return CorruptionError(
        f"catalog {file}: {what}. Its bytes are not those that were committed: restore the directory from a copy",
        key=key,
        file=file,
    )
