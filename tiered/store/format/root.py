"""The root row of a catalog: the facts about a generation of the whole store, and their bytes.

The layout is on the first screen of ``catalog.py``. Decoding trusts nothing: a field is used only after it has been
seen to lie inside the bytes that there are, and the row only after its digest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tiered.errors import CorruptionError, UsageError
from tiered.store.format.checksum import DIGEST_NBYTES, digest

__all__ = [
    "FORMAT_VERSION",
    "LIMIT",
    "ROOT_HEADER_NBYTES",
    "ExternalFile",
    "Root",
    "RootHeader",
    "corrupt",
    "decode_root",
    "decode_root_header",
    "encode_root",
    "refuse_other_version",
]

FORMAT_VERSION = 2

LIMIT = 1 << 63
"""Every integer of the format is below this: it fits SQLite, torch and off_t."""

_ROOT = struct.Struct("<16sQQQIIQQ")
_FILE = struct.Struct("<QQH")
_MASK = (1 << 64) - 1

ROOT_HEADER_NBYTES = _ROOT.size
"""How many bytes at the start of the root row's body hold all but the external files and the state."""


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file of the user's that records lie in: its name without folders, only to be shown, and what tells it apart."""

    name: str
    nbytes: int
    header_digest: int  # xxh3-64 of its safetensors header, the eight bytes of its length included


@dataclass(frozen=True, slots=True)
class Root:
    """The facts about a generation of the whole store, apart from its rows."""

    store_uuid: bytes  # 16 bytes
    generation: int
    next_key_id: int
    num_directories: int
    state: str  # JSON text of everything that rides along with the commit
    nonce: int = 0  # below 2**64: with the number it tells generations of the same number apart
    external: tuple[ExternalFile, ...] = ()  # extents of external records have their place in here


@dataclass(frozen=True, slots=True)
class RootHeader:
    """The root row without external files and state: facts about the store, and the number and sum of the rows."""

    store_uuid: bytes
    generation: int
    nonce: int
    next_key_id: int
    num_directories: int
    external_nbytes: int
    num_rows: int  # pages included
    digest_sum: int  # modulo 2**64, pages included


def encode_root(root: Root, num_rows: int, digest_sum: int) -> tuple[bytes, bytes]:
    """Return the body and the digest of the root row."""
    external = b"".join(map(_encode_file, root.external))
    header = _ROOT.pack(
        root.store_uuid, root.generation, root.nonce, root.next_key_id, root.num_directories, len(external),
        num_rows, digest_sum & _MASK,
    )  # fmt: skip
    body = header + external + root.state.encode("utf-8", "surrogatepass")
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
    if max(header.generation, header.next_key_id) >= LIMIT or not header.next_key_id or not header.num_directories:
        raise corrupt("the root row holds numbers that no store writes", file)
    state_at = _ROOT.size + header.external_nbytes
    try:
        external = _decode_files(body[_ROOT.size : state_at], header.external_nbytes)
        state = body[state_at:].decode("utf-8", "surrogatepass")
    except (UnicodeDecodeError, struct.error) as error:
        raise corrupt("the state in the root row, or its list of external files, is not text", file) from error
    root = Root(
        header.store_uuid, header.generation, header.next_key_id, header.num_directories, state, header.nonce, external
    )
    return root, header


def _encode_file(file: ExternalFile) -> bytes:
    name = file.name.encode("utf-8", "surrogatepass")
    return _FILE.pack(file.nbytes, file.header_digest, len(name)) + name


def _decode_files(encoded: bytes, nbytes: int) -> tuple[ExternalFile, ...]:
    """Return the files of a list that must end after ``nbytes``. Raises struct.error, UnicodeDecodeError."""
    files = []
    start = 0
    while start < nbytes:
        file_nbytes, header_digest, name_nbytes = _FILE.unpack_from(encoded, start)
        start += _FILE.size + name_nbytes
        name = encoded[start - name_nbytes : start].decode("utf-8", "surrogatepass")
        files.append(ExternalFile(name, file_nbytes, header_digest))
    if start != len(encoded):
        raise struct.error(f"{len(encoded)} bytes for a list of {start}")
    return tuple(files)


def refuse_other_version(file_version: int, root_version: int, file: str) -> None:
    """Raise UsageError where both places that hold the format version name another; CorruptionError if they differ.

    These two places stay the same in every version.
    """
    if file_version != root_version or not 0 < file_version < 1 << 31:
        raise corrupt(f"it gives its format version as {file_version} and as {root_version}", file)
    if file_version != FORMAT_VERSION:
        way_on = (
            "open it once with tiered 0.2.0 and commit, which writes version 2"
            if file_version < FORMAT_VERSION
            else "open it with the version of tiered that wrote it"
        )
        raise UsageError(
            f"{file} has format version {file_version}; this tiered reads version {FORMAT_VERSION}: {way_on}"
        )


def _root_digest(body: bytes) -> bytes:
    return digest(FORMAT_VERSION.to_bytes(4, "little") + body, 0).to_bytes(DIGEST_NBYTES, "little")


def corrupt(what: str, file: str, key: str = "") -> CorruptionError:
    """Return the error for a catalog that is damaged."""
    return CorruptionError(
        f"catalog {file}: {what}. Its bytes are not those that were committed: restore the directory from a copy",
        key=key,
        file=file,
    )
