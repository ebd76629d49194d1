"""The rows of a committed generation, checked when they are read and decoded when they are used.

A million keys open in seconds and cost little memory, because a row stays the catalog's bytes until it is used.
Everything is checked nevertheless: the digest of each row, its fields, and all of them against the root.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, num_blocks
from tiered.store.format.row import (
    EXTENT_NBYTES,
    ROW_HEADER_NBYTES,
    RootHeader,
    Row,
    corrupt,
    decode_row,
    place_problem,
    row_problem,
    row_seed,
    unpack_header,
)
from tiered.store.format.spec import Spec

__all__ = ["EXTENTS_DTYPE", "CommittedRows"]

EXTENTS_DTYPE = np.dtype([("device", "<u2"), ("file", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])
"""One extent as the format has it, 22 bytes."""

_KEY_NBYTES = 8  # the key id, which a row's digest covers before the body
_HEADER_END = _KEY_NBYTES + ROW_HEADER_NBYTES
_MASK = (1 << 64) - 1
_MAX_NUM_KINDS = 4096  # that are remembered at a time: no catalog can make the memory of them grow

_Kind = tuple[int, int, int, int, bytes]  # nbytes, number of extents, bytes of the dtype, inline, dtype and shape


class CommittedRows:
    """The rows of one generation by key id. Iterating decodes them one by one; ``len`` and ``encoded`` do not."""

    def __init__(self, encoded: dict[str, bytes], extents: np.ndarray) -> None:
        self.encoded = encoded  # name -> key id and body, for ``decode_row``
        self.extents = extents  # (num_extents,) EXTENTS_DTYPE, in the order of rows

    @classmethod
    def empty(cls) -> CommittedRows:
        """Return no rows."""
        return cls({}, np.empty(0, dtype=EXTENTS_DTYPE))

    @classmethod
    def decode(cls, raw: Iterable[tuple[int, bytes, bytes]], header: RootHeader, file: str) -> CommittedRows:
        """Check (key id, body, digest) in ascending key ids, each row and all of them against the root.

        Raises CorruptionError that names ``file`` and, where it is known, the key.
        """
        encoded: dict[str, bytes] = {}
        extents = bytearray()
        num_rows = total = 0
        kinds: dict[_Kind, int] = {}  # rows that were checked in full -> bytes behind their extents
        seed, generation_limit = row_seed(header.store_uuid), header.generation
        for key_id, body, expected in raw:
            row = key_id.to_bytes(_KEY_NBYTES, "little") + body
            found = xxhash.xxh3_64_intdigest(row, seed)
            if found.to_bytes(DIGEST_NBYTES, "little") != expected or len(row) < _HEADER_END:
                raise _undecodable(row, file)
            total += found
            num_rows += 1
            generation, nbytes, name_nbytes, num_extents, dtype_nbytes, num_dims, inline = unpack_header(row, 8)
            dtype_at = _HEADER_END + name_nbytes
            extents_at = dtype_at + dtype_nbytes + 8 * num_dims
            content_at = extents_at + EXTENT_NBYTES * num_extents
            kind = (nbytes, num_extents, dtype_nbytes, inline, row[dtype_at:extents_at])
            if (
                kinds.get(kind) != len(row) - content_at
                or generation > generation_limit
                or num_extents > 1
                or (num_extents and int.from_bytes(row[content_at - 8 : content_at], "little") < nbytes)
            ):
                _check(row, header, file)
                if len(kinds) >= _MAX_NUM_KINDS:
                    kinds.clear()
                kinds[kind] = nbytes if inline else DIGEST_NBYTES * num_blocks(nbytes)
            extents += row[extents_at:content_at]
            try:
                encoded[row[_HEADER_END:dtype_at].decode("utf-8", "surrogatepass")] = row
            except UnicodeDecodeError:
                raise _undecodable(row, file) from None
        if num_rows != header.num_rows:
            raise corrupt(f"expected {header.num_rows} rows, got {num_rows}", file)
        if total & _MASK != header.digest_sum:
            raise corrupt("the rows are not those of the last commit: the sum of their digests differs", file)
        if len(encoded) != num_rows:
            raise corrupt("two rows have the same name", file)
        rows = cls(encoded, np.frombuffer(extents, dtype=EXTENTS_DTYPE))
        rows._check_places(header, file)
        return rows

    def _check_places(self, header: RootHeader, file: str) -> None:
        """Check the extents and the key ids of all rows at once, as ``_check`` does for one row."""
        limit = 1 << 63
        offset, nbytes = self.extents["offset"], self.extents["nbytes"]
        is_bad = (nbytes == 0) | (offset >= limit) | (nbytes >= limit) | (offset + nbytes >= limit)
        is_bad |= self.extents["device"] >= header.num_directories
        if is_bad.any():
            _check(self.encoded[self.owner(int(np.argmax(is_bad)))], header, file)
        last = next(reversed(self.encoded.values()), None)
        if last is not None:  # the largest key id
            _check(last, header, file)

    def owner(self, index: int) -> str:
        """Return the name of the row that has the extent ``extents[index]``."""
        for name, row in self.encoded.items():
            index -= unpack_header(row, _KEY_NBYTES)[3]
            if index < 0:
                return name
        raise IndexError(index)

    def __len__(self) -> int:
        return len(self.encoded)

    def __iter__(self) -> Iterator[Row]:
        return map(decode_row, self.encoded.values())

    def __repr__(self) -> str:
        return f"<CommittedRows {len(self.encoded)} rows, {len(self.extents)} extents>"


def _check(encoded: bytes, header: RootHeader, file: str) -> None:
    """Raise CorruptionError unless the row makes sense in itself and goes with the root."""
    try:
        row = decode_row(encoded)
    except (ValueError, struct.error) as error:
        key_id = int.from_bytes(encoded[:_KEY_NBYTES], "little")
        raise corrupt(f"the row with key id {key_id} cannot be decoded: {error}", file) from error
    problem = row_problem(row) or place_problem(row, header)
    if problem is not None:
        raise corrupt(f"the row of {row.name!r} (key id {row.key_id}): {problem}", file, row.name)
    try:
        Spec.of(row)
    except CorruptionError as error:
        raise corrupt(str(error), file, row.name) from error


def _undecodable(encoded: bytes, file: str) -> CorruptionError:
    """Return the error for a row that does not match its digest, with its name where that can be read."""
    key_id = int.from_bytes(encoded[:_KEY_NBYTES], "little")
    try:
        name = decode_row(encoded).name
    except (ValueError, struct.error) as error:
        return corrupt(f"the row with key id {key_id} cannot be decoded: {error}", file)
    return corrupt(f"the row of {name!r} (key id {key_id}) does not match its digest", file, name)
