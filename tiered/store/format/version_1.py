"""Format version 1, which is read and written anew as version 2, and nothing else.

    root     body    store uuid 16 bytes, generation u64, next key id u64, directories u32, number of rows u64,
                     sum of the row digests u64 (mod 2**64), then the state as UTF-8 text to the end
             digest  as in version 2, of format u32 = 1 + body
    records  body    generation u64, nbytes u64, name bytes u32, extents u32, dtype bytes u8, dimensions u8, inline u8;
                     then as in version 2 with inline for the kind, and blocks of 4 MiB
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from tiered.store.format.checksum import DIGEST_NBYTES, MAX_BLOCK_SHIFT, digest
from tiered.store.format.root import Root, corrupt, encode_root
from tiered.store.format.row import Row, decode_row, encode_page, encode_row, page_digest, pages_of, row_seed

__all__ = ["Converted", "convert"]

_ROOT = struct.Struct("<16sQQIQQ")
_ROW_NBYTES = struct.calcsize("<QQIIBBB")
_MASK = (1 << 64) - 1


class Converted(NamedTuple):
    """The columns of a catalog of version 2 in place of one of version 1."""

    root: tuple[bytes, bytes]  # body, digest
    rows: list[tuple[int, bytes, bytes]]  # key id, body, digest; ascending
    pages: list[tuple[int, int, bytes, bytes]]  # key id, page, body, digest; ascending


def convert(root: tuple[bytes, bytes], rows: Iterable[tuple[int, bytes, bytes]], file: str) -> Converted:
    """Return the rows of version 2 for those of version 1, each checked as that one does. CorruptionError."""
    body, expected = root
    if len(body) < _ROOT.size or _digest((1).to_bytes(4, "little") + body, 0) != expected:
        raise corrupt("the root row does not match its digest", file)
    store_uuid, generation, next_key_id, num_directories, num_rows, digest_sum = _ROOT.unpack_from(body)
    made: list[tuple[int, bytes, bytes]] = []
    pages: list[tuple[int, int, bytes, bytes]] = []
    total = num_found = 0
    seed = row_seed(store_uuid)
    for key_id, row_body, row_digest in rows:
        if _digest(key_id.to_bytes(8, "little") + row_body, seed) != row_digest:
            raise corrupt(f"the row with key id {key_id} does not match its digest", file)
        total += int.from_bytes(row_digest, "little")
        num_found += 1
        row = _row(key_id, row_body, file)
        try:
            made.append((key_id, *encode_row(row, store_uuid)))
        except ValueError as error:  # fields that no store writes
            raise corrupt(str(error), file, row.name) from error
        for number, page in enumerate(pages_of(row)):
            encoded = encode_page(page)
            pages.append((key_id, number, encoded, page_digest(key_id, number, encoded, seed)))
    if num_found != num_rows or total & _MASK != digest_sum:
        raise corrupt(f"expected {num_rows} rows, got {num_found}, or other ones than the last commit's", file)
    digests = [each[2] for each in made] + [each[3] for each in pages]
    new_total = sum(int.from_bytes(each, "little") for each in digests)
    try:
        state = body[_ROOT.size :].decode("utf-8", "surrogatepass")
        new_root = Root(store_uuid, generation, next_key_id, num_directories, state)
        return Converted(encode_root(new_root, len(made) + len(pages), new_total), made, pages)
    except (UnicodeDecodeError, ValueError) as error:
        raise corrupt(f"the root row holds what no store writes: {error}", file) from error


def _row(key_id: int, body: bytes, file: str) -> Row:
    """Return the row with this body. Raises CorruptionError."""
    as_now = body[:_ROW_NBYTES] + bytes((MAX_BLOCK_SHIFT,)) + body[_ROW_NBYTES:]
    try:
        if body[_ROW_NBYTES - 1] > 1:
            raise ValueError(f"inline is {body[_ROW_NBYTES - 1]}")
        return decode_row(key_id.to_bytes(8, "little") + as_now)
    except (ValueError, IndexError, struct.error) as error:
        raise corrupt(f"the row with key id {key_id} cannot be decoded: {error}", file) from error


def _digest(content: bytes, seed: int) -> bytes:
    return digest(content, seed).to_bytes(DIGEST_NBYTES, "little")
