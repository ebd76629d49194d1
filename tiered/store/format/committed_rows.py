"""The rows of a committed generation, checked when they are read and decoded when they are used.

A million keys open in seconds and cost little memory, because a row stays the catalog's bytes until it is used, and of
a page only its extents are kept. Everything is checked nevertheless: the digest of each row and page, their fields, and
all of them against the root.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash

from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.root import ExternalFile, RootHeader, corrupt
from tiered.store.format.row import (
    EXTENT_NBYTES,
    EXTERNAL,
    HERE,
    INLINE,
    PAGED,
    ROW_HEADER_NBYTES,
    Row,
    Spec,
    content_nbytes,
    decode_page,
    decode_row,
    extents_problem,
    page_digest,
    place_problem,
    row_problem,
    row_seed,
    unpack_header,
)

__all__ = ["EXTENTS_DTYPE", "CommittedRows"]

EXTENTS_DTYPE = np.dtype([("device", "<u2"), ("file", "<u4"), ("offset", "<u8"), ("nbytes", "<u8")])
"""One extent as the format has it, 22 bytes."""

_KEY_NBYTES = 8  # the key id, which a row's digest covers before the body
_HEADER_END = _KEY_NBYTES + ROW_HEADER_NBYTES
_PAGE_HEADER_NBYTES = 16
_LIMIT = 1 << 63
_MASK = (1 << 64) - 1
_MAX_NUM_KINDS = 4096  # that are remembered at a time: no catalog can make the memory of them grow

_Kind = tuple[int, int, int, int, int, bytes]  # nbytes, places, bytes of the dtype, kind, shift, dtype and shape


class CommittedRows:
    """The rows of one generation by key id. Iterating decodes them one by one; ``len`` and ``encoded`` do not."""

    def __init__(self, encoded: dict[str, bytes], extents: np.ndarray, paged: dict[int, str] | None = None) -> None:
        self.encoded = encoded  # name -> key id and body, for ``decode_row``
        self.extents = extents  # (num_extents,) EXTENTS_DTYPE, in the order of rows, then in that of pages
        self._paged = paged or {}  # index of the first extent of a record's pages -> its name, ascending

    @classmethod
    def empty(cls) -> CommittedRows:
        """Return no rows."""
        return cls({}, np.empty(0, dtype=EXTENTS_DTYPE))

    @classmethod
    def decode(
        cls,
        raw: Iterable[tuple[int, bytes, bytes]],
        header: RootHeader,
        file: str,
        *,
        raw_pages: Iterable[tuple[int, int, bytes, bytes]] = (),
        external: Sequence[ExternalFile] = (),
    ) -> CommittedRows:
        """Check (key id, body, digest) in ascending key ids, each row and all of them against the root.

        ``raw_pages`` are (key id, page, body, digest) in ascending order; ``external`` are the root's files.
        Raises CorruptionError that names ``file`` and, where it is known, the key.
        """
        decoding = _Decoding(header, file, external)
        decoding.rows(raw)
        paged = decoding.pages(raw_pages)
        found = decoding.num_rows + decoding.num_pages
        if found != header.num_rows:
            raise corrupt(f"expected {header.num_rows} rows, got {found}", file)
        if decoding.total & _MASK != header.digest_sum:
            raise corrupt("the rows are not those of the last commit: the sum of their digests differs", file)
        if len(decoding.encoded) + decoding.num_pages != header.num_rows:
            raise corrupt("two rows have the same name", file)
        rows = cls(decoding.encoded, np.frombuffer(decoding.extents, dtype=EXTENTS_DTYPE), paged)
        rows._check_places(decoding)
        return rows

    def _check_places(self, decoding: _Decoding) -> None:
        """Check the extents and the key ids of all rows at once, as ``_Decoding.check`` does for one row."""
        offset, nbytes = self.extents["offset"], self.extents["nbytes"]
        is_bad = (nbytes == 0) | (offset >= _LIMIT) | (nbytes >= _LIMIT) | (offset + nbytes >= _LIMIT)
        is_bad |= self.extents["device"] >= decoding.header.num_directories
        if is_bad.any():
            name = self.owner(int(np.argmax(is_bad)))
            decoding.check(self.encoded[name])
            raise corrupt(f"a page of {name!r} has an extent that is no range of a file", decoding.file, name)
        last = next(reversed(self.encoded.values()), None)
        if last is not None:  # the largest key id
            decoding.check(last)

    def external(self) -> Iterator[Row]:
        """Yield the rows that lie in external files."""
        for row in self.encoded.values():
            if unpack_header(row, _KEY_NBYTES)[6] == EXTERNAL:
                yield decode_row(row)

    def owner(self, index: int) -> str:
        """Return the name of the row that has the extent ``extents[index]``."""
        firsts = list(self._paged)
        if firsts and index >= firsts[0]:
            if index >= len(self.extents):
                raise IndexError(index)
            return self._paged[firsts[bisect_right(firsts, index) - 1]]
        for name, row in self.encoded.items():
            header = unpack_header(row, _KEY_NBYTES)
            index -= header[3] if header[6] == HERE else 0
            if index < 0:
                return name
        raise IndexError(index)

    def __len__(self) -> int:
        return len(self.encoded)

    def __iter__(self) -> Iterator[Row]:
        return map(decode_row, self.encoded.values())

    def __repr__(self) -> str:
        return f"<CommittedRows {len(self.encoded)} rows, {len(self.extents)} extents>"


class _Decoding:
    """Rows and pages on their way in: each is checked by itself; number and sum are for the end."""

    def __init__(self, header: RootHeader, file: str, external: Sequence[ExternalFile]) -> None:
        self.header = header
        self.file = file
        self.encoded: dict[str, bytes] = {}
        self.extents = bytearray()
        self.num_rows = self.num_pages = self.total = 0
        self._external = external
        self._paged: dict[int, str] = {}  # key id -> name
        self._kinds: dict[_Kind, int] = {}  # rows that were checked in full -> bytes behind their extents
        self._seed = row_seed(header.store_uuid)

    def rows(self, raw: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Take all rows. One loop over locals: a million rows take as long to read as to check."""
        encoded, extents, kinds, seed = self.encoded, self.extents, self._kinds, self._seed
        limit, total, num_rows = self.header.generation, 0, 0
        for key_id, body, expected in raw:
            row = key_id.to_bytes(_KEY_NBYTES, "little") + body
            found = xxhash.xxh3_64_intdigest(row, seed)
            if found.to_bytes(DIGEST_NBYTES, "little") != expected or len(row) < _HEADER_END:
                raise _undecodable(row, self.file)
            total += found
            num_rows += 1
            generation, nbytes, name_nbytes, num_places, dtype_nbytes, num_dims, kind, shift = unpack_header(row, 8)
            dtype_at = _HEADER_END + name_nbytes
            places_at = dtype_at + dtype_nbytes + 8 * num_dims
            content_at = places_at + EXTENT_NBYTES * num_places
            looks = (nbytes, num_places, dtype_nbytes, kind, shift, row[dtype_at:places_at])
            if (
                kinds.get(looks) != len(row) - content_at
                or generation > limit
                or num_places > 1
                or (num_places and int.from_bytes(row[content_at - 8 : content_at], "little") < nbytes)
            ):
                self.check(row)
                if len(kinds) >= _MAX_NUM_KINDS:
                    kinds.clear()
                if kind <= INLINE:
                    kinds[looks] = content_nbytes(nbytes, kind, shift)
            if kind == HERE:
                extents += row[places_at:content_at]
            try:
                name = row[_HEADER_END:dtype_at].decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise _undecodable(row, self.file) from None
            if kind == PAGED:
                self._paged[key_id] = name
            encoded[name] = row
        self.total, self.num_rows = total, num_rows

    def pages(self, raw: Iterable[tuple[int, int, bytes, bytes]]) -> dict[int, str]:
        """Take all pages; return the name of each record that has some by the index of their first extent."""
        firsts: dict[int, str] = {}
        rest = iter(raw)
        for key_id, name in self._paged.items():
            nbytes, block_nbytes = _size(self.encoded[name])
            firsts[len(self.extents) // EXTENT_NBYTES] = name
            for page in range(-(-nbytes // (block_nbytes * PAGE_BLOCKS))):
                found = next(rest, None)
                if found is None:
                    raise corrupt(f"pages are missing of {name!r}", self.file, name)
                if found[:2] != (key_id, page):
                    what = f"page {found[1]} of key id {found[0]}, expected {page} of {key_id}"
                    raise corrupt(what, self.file, name)
                self._page(name, page, *found[2:], nbytes, block_nbytes)
        for key_id, page, *_ in rest:
            raise corrupt(f"page {page} of key id {key_id}, expected none", self.file)
        return firsts

    def _page(self, name: str, page: int, body: bytes, expected: bytes, nbytes: int, block_nbytes: int) -> None:
        key_id = int.from_bytes(self.encoded[name][:_KEY_NBYTES], "little")
        where = f"page {page} of {name!r} (key id {key_id})"
        if page_digest(key_id, page, body, self._seed) != expected:
            raise corrupt(f"{where} does not match its digest", self.file, name)
        self.total += int.from_bytes(expected, "little")
        self.num_pages += 1
        rest_nbytes = min(nbytes - page * PAGE_BLOCKS * block_nbytes, PAGE_BLOCKS * block_nbytes)
        try:
            found = decode_page(body, -(-rest_nbytes // block_nbytes))
        except (ValueError, struct.error) as error:
            raise corrupt(f"{where} cannot be decoded: {error}", self.file, name) from error
        problem = extents_problem(found.extents, rest_nbytes)
        newest = int(np.frombuffer(found.written or found.generation.to_bytes(8, "little"), dtype="<u8").max())
        if problem is None and newest > self.header.generation:
            problem = f"written for generation {newest}, committed is {self.header.generation}"
        if problem is not None:
            raise corrupt(f"{where}: {problem}", self.file, name)
        self.extents += body[_PAGE_HEADER_NBYTES : _PAGE_HEADER_NBYTES + EXTENT_NBYTES * len(found.extents)]

    def check(self, encoded: bytes) -> None:
        """Raise CorruptionError unless the row makes sense in itself and goes with the root."""
        try:
            row = decode_row(encoded)
        except (ValueError, struct.error) as error:
            key_id = int.from_bytes(encoded[:_KEY_NBYTES], "little")
            raise corrupt(f"the row with key id {key_id} cannot be decoded: {error}", self.file) from error
        problem = row_problem(row) or place_problem(row, self.header, self._external)
        if problem is not None:
            raise corrupt(f"the row of {row.name!r} (key id {row.key_id}): {problem}", self.file, row.name)
        try:
            Spec.of(row)
        except CorruptionError as error:
            raise corrupt(str(error), self.file, row.name) from error


def _undecodable(encoded: bytes, file: str) -> CorruptionError:
    """Return the error for a row that does not match its digest, with its name where that can be read."""
    key_id = int.from_bytes(encoded[:_KEY_NBYTES], "little")
    try:
        name = decode_row(encoded).name
    except (ValueError, struct.error) as error:
        return corrupt(f"the row with key id {key_id} cannot be decoded: {error}", file)
    return corrupt(f"the row of {name!r} (key id {key_id}) does not match its digest", file, name)


def _size(encoded: bytes) -> tuple[int, int]:
    """Return the bytes of a row's record, and of its blocks."""
    header = unpack_header(encoded, _KEY_NBYTES)
    return header[1], 1 << header[7]
