"""The rows of a catalog, and the pages of the large ones: their fields, their bytes, the extents and specs in them.

The layout is on the first screen of ``catalog.py``. Decoding trusts nothing: a field is used only after it has been
seen to lie inside the bytes that there are, and a row only after its digest.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tiered.errors import CorruptionError, UsageError
from tiered.store.format.checksum import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    MAX_BLOCK_SHIFT,
    MIN_BLOCK_SHIFT,
    PAGE_BLOCKS,
    digest,
    num_blocks,
)
from tiered.store.format.root import LIMIT, ExternalFile, RootHeader

__all__ = [
    "EXTENT_DTYPE",
    "EXTENT_NBYTES",
    "EXTERNAL",
    "HERE",
    "INLINE",
    "INLINE_NBYTES",
    "KIND_AT",
    "MAX_NUM_DIMS",
    "PAGED",
    "ROW_HEADER_NBYTES",
    "Extent",
    "ExternalRange",
    "Page",
    "Row",
    "Spec",
    "content_nbytes",
    "decode_page",
    "decode_row",
    "encode_page",
    "encode_row",
    "extents_problem",
    "has_unread",
    "is_kept",
    "join",
    "learn",
    "num_unread",
    "pack",
    "page_digest",
    "pages_of",
    "part_of",
    "pieces",
    "place_problem",
    "row_problem",
    "row_seed",
    "unpack_header",
    "unread_digests",
]


class Extent(NamedTuple):
    """A contiguous range of one file: the device's index, the file's number, offset and length in bytes."""

    device: int
    file: int
    offset: int
    nbytes: int


def join(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return ``extents`` with those that go on where the one before ends made one."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is not None and last[:2] == extent[:2] and last.offset + last.nbytes == extent.offset:
            joined[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
        else:
            joined.append(extent)
    return tuple(joined)


def pieces(extents: Iterable[Extent], start: int, nbytes: int) -> Iterator[Extent]:
    """Yield, in order, the parts of ``extents`` that hold the logical bytes [start, start + nbytes) of their record.

    Raises ValueError when the extents end before that.
    """
    skip, wanted = start, nbytes
    for extent in extents:
        if wanted == 0:
            return
        if skip >= extent.nbytes:
            skip -= extent.nbytes
            continue
        length = min(extent.nbytes - skip, wanted)
        yield extent._replace(offset=extent.offset + skip, nbytes=length)
        skip, wanted = 0, wanted - length
    if wanted:
        raise ValueError(f"bytes [{start}, {start + nbytes}) end {wanted} bytes beyond their extents")


# -- row ---------------------------------------------------------------------------------------------------------------


HERE, INLINE, PAGED, EXTERNAL = range(4)
"""Where a row says that its bytes are: in extents it names, in itself, in extents its pages name, in external files."""

INLINE_NBYTES = 1024
"""Tensors of at most this many bytes live in their catalog row; part of the disk format."""

_ROW = struct.Struct("<QQIIBBBB")
_EXTENT = struct.Struct("<HiQQ")
_RANGE = struct.Struct("<QIQQ")
_PAGE = struct.Struct("<QII")

MAX_NUM_DIMS = 255
"""How many dimensions a row has room for: their number is one byte."""

ROW_HEADER_NBYTES = _ROW.size
"""How many bytes at the start of a row's body have a fixed place."""

KIND_AT = 26
"""Which byte of a row's body is its kind."""

EXTENT_NBYTES = _EXTENT.size
"""Bytes of one extent in a row."""

EXTENT_DTYPE = np.dtype([("device", "<u2"), ("file", "<i4"), ("offset", "<u8"), ("nbytes", "<u8")])
"""An extent in a row, as an array has it. Files of a catalog have numbers below 2**31; SCRATCH, in memory alone, -1."""

unpack_header = _ROW.unpack_from
"""Return generation, nbytes, the numbers of name bytes, extents, dtype bytes, dimensions, the kind, the block shift."""


class ExternalRange(NamedTuple):
    """Bytes of a record that lie in an external file: their place in the record, and in that file."""

    start: int
    file: int  # in ``Root.external``
    offset: int
    nbytes: int


@dataclass(slots=True, unsafe_hash=True)  # not frozen: that makes a row cost twice as much, and a million are made
class Row:
    """The facts about one key in the catalog, or about some of its blocks in a row. Never changed once it is made.

    ``generation`` is the one that the bytes were written for, where ``written`` does not say otherwise block by block;
    with the key id it seeds the digests. A tensor of at most 1 KiB may live in ``inline``; it then has neither extents
    nor digests. Nor has a row that ``is_paged``: these are in its pages, from which ``part`` makes rows that have them.
    Bytes between ``ranges`` are zeros.
    """

    key_id: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    generation: int
    extents: tuple[Extent, ...]
    digests: bytes = field(hash=False)  # 8 per block, little-endian; see ``unread_digests``
    inline: bytes | None
    block_nbytes: int = BLOCK_NBYTES  # a power of two
    written: bytes = b""  # the generation of each block, 8 bytes each, little-endian
    ranges: tuple[ExternalRange, ...] = ()
    is_paged: bool = False
    base_block: int = 0  # the number in its record of the first block
    pages: Any = None  # of a paged one that is in use: a Pages of paged_rows.py

    @property
    def num_blocks(self) -> int:
        """How many blocks the row tells of."""
        return num_blocks(self.nbytes, self.block_nbytes)

    @property
    def has_extents(self) -> bool:
        """Whether the row has bytes in the store's own files."""
        return self.is_paged or bool(self.extents)

    @property
    def stored_nbytes(self) -> int:
        """About how many bytes of the store's own files the row has."""
        return self.nbytes if self.is_paged else sum(extent.nbytes for extent in self.extents)

    def generation_of(self, block: int) -> int:
        """Return the generation that ``block`` of this row was written for."""
        return int.from_bytes(self.written[8 * block : 8 * block + 8], "little") if self.written else self.generation


class Page(NamedTuple):
    """Extents and digests of ``PAGE_BLOCKS`` blocks of a record, or of as many as are left at its end."""

    generation: int  # of all blocks, where ``written`` does not say otherwise
    places: bytes  # of the extents, an ``EXTENT_DTYPE`` each
    digests: bytes
    written: bytes  # as in a row; b"" where all blocks are of ``generation``

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(map(Extent._make, _EXTENT.iter_unpack(self.places)))

    def packed(self) -> Page:
        """Return itself: see ``ChangedPage``."""
        return self


def encode_row(row: Row, store_uuid: bytes) -> tuple[bytes, bytes]:
    """Return the body and the digest of ``row``; ValueError for a row that the format does not allow.

    A row of too many blocks leaves extents and digests to its pages: see ``pages_of``.
    """
    problem = row_problem(row)
    if problem is not None:
        raise ValueError(f"row of {row.name!r} (key id {row.key_id}): {problem}")
    name = row.name.encode("utf-8", "surrogatepass")
    dtype = row.dtype.encode("ascii")
    kind = _kind(row)
    places: list[bytes] = []
    content = b""
    if kind == HERE:
        places, content = [_EXTENT.pack(*extent) for extent in row.extents], row.digests
    elif kind == EXTERNAL:
        places, content = [_RANGE.pack(*each) for each in row.ranges], row.digests
    elif row.inline is not None:
        content = row.inline
    body = b"".join(
        (
            _ROW.pack(
                row.generation, row.nbytes, len(name), len(places), len(dtype), len(row.shape), kind,
                row.block_nbytes.bit_length() - 1,
            ),
            name,
            dtype,
            struct.pack(f"<{len(row.shape)}Q", *row.shape),
            *places,
            content,
        )
    )  # fmt: skip
    return body, _row_digest(row.key_id, body, row_seed(store_uuid))


def _kind(row: Row) -> int:
    if row.inline is not None:
        return INLINE
    if row.ranges:
        return EXTERNAL
    return PAGED if row.is_paged or row.written or row.nbytes > row.block_nbytes * PAGE_BLOCKS else HERE


def part_of(row: Row, first: int, blocks: int) -> Row:
    """Return a row, with extents and digests, of ``blocks`` blocks of the paged ``row`` from ``first`` on; blocks."""
    assert row.pages is not None, row
    extents: list[Extent] = []
    digests, written = bytearray(), bytearray()
    for number in range(first // PAGE_BLOCKS, -(-(first + blocks) // PAGE_BLOCKS)):
        page = row.pages.page(row, number)
        begin = max(0, first - number * PAGE_BLOCKS)
        end = min(PAGE_BLOCKS, first + blocks - number * PAGE_BLOCKS, len(page.digests) // DIGEST_NBYTES)
        nbytes = sum(extent.nbytes for extent in page.extents)
        stop = nbytes if end == len(page.digests) // DIGEST_NBYTES else end * row.block_nbytes
        extents += pieces(page.extents, begin * row.block_nbytes, stop - begin * row.block_nbytes)
        digests += page.digests[DIGEST_NBYTES * begin : DIGEST_NBYTES * end]
        written += page.written[8 * begin : 8 * end] or page.generation.to_bytes(8, "little") * (end - begin)
    start = first * row.block_nbytes
    return replace(
        row, nbytes=min(row.nbytes - start, blocks * row.block_nbytes), extents=tuple(extents), digests=bytes(digests),
        written=bytes(written), base_block=first, is_paged=False, pages=None,
    )  # fmt: skip


def pack(extents: Iterable[Extent]) -> bytes:
    """Return ``extents`` as the places of a page."""
    return b"".join(_EXTENT.pack(*extent) for extent in extents)


def pages_of(row: Row) -> Iterator[Page]:
    """Yield the pages of a row that has all its extents and digests, and too many of them to keep them in itself."""
    if row.is_paged or _kind(row) != PAGED:
        return
    for first in range(0, row.num_blocks, PAGE_BLOCKS):
        blocks = min(PAGE_BLOCKS, row.num_blocks - first)
        start = first * row.block_nbytes
        nbytes = min(blocks * row.block_nbytes, row.nbytes - start)
        is_last = first + blocks == row.num_blocks
        extents = tuple(pieces(row.extents, start, sum(e.nbytes for e in row.extents) - start if is_last else nbytes))
        digests = row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)]
        yield Page(row.generation, pack(extents), digests, row.written[8 * first : 8 * (first + blocks)])


def encode_page(page: Page) -> bytes:
    """Return the body of ``page``."""
    header = _PAGE.pack(page.generation, len(page.places) // EXTENT_NBYTES, bool(page.written))
    return b"".join((header, page.places, page.digests, page.written))


def decode_page(body: bytes, blocks: int) -> Page:
    """Return the page of ``blocks`` blocks. Raises ValueError or struct.error."""
    generation, num_extents, has_written = _PAGE.unpack_from(body)
    digests_at = _PAGE.size + _EXTENT.size * num_extents
    written_at = digests_at + DIGEST_NBYTES * blocks
    expected_nbytes = written_at + (8 * blocks if has_written else 0)
    if has_written > 1 or expected_nbytes != len(body):
        raise ValueError(f"it has {len(body)} bytes, its fields need {expected_nbytes}")
    return Page(generation, body[_PAGE.size : digests_at], body[digests_at:written_at], body[written_at:])


def page_digest(key_id: int, page: int, body: bytes, seed: int) -> bytes:
    """Return the digest of the body of a page; ``seed`` as for rows."""
    return digest(b"".join((key_id.to_bytes(8, "little"), page.to_bytes(8, "little"), body)), seed).to_bytes(
        DIGEST_NBYTES, "little"
    )


def decode_row(encoded: bytes) -> Row:
    """Return the row of a key id (u64) and the body that follows it. Raises ValueError or struct.error."""
    key_id, body = int.from_bytes(encoded[:8], "little"), encoded[8:]
    generation, nbytes, name_nbytes, num_places, dtype_nbytes, num_dims, kind, shift = _ROW.unpack_from(body)
    if not MIN_BLOCK_SHIFT <= shift <= MAX_BLOCK_SHIFT or kind > EXTERNAL:
        raise ValueError(f"it is of kind {kind}, with blocks of 2**{shift} bytes")
    dtype_at = _ROW.size + name_nbytes
    shape_at = dtype_at + dtype_nbytes
    places_at = shape_at + 8 * num_dims
    content_at = places_at + (_RANGE if kind == EXTERNAL else _EXTENT).size * num_places
    end = content_at + content_nbytes(nbytes, kind, shift)
    # Everything that is built below is cut from the body: no number in it can ask for more than it holds.
    if end != len(body):
        raise ValueError(f"it has {len(body)} bytes, its fields need {end}")
    places, content = body[places_at:content_at], body[content_at:]
    lacks_some = kind == EXTERNAL and not np.frombuffer(content, np.uint64).all()
    return Row(
        key_id,
        body[_ROW.size : dtype_at].decode("utf-8", "surrogatepass"),
        body[dtype_at:shape_at].decode("ascii"),
        struct.unpack_from(f"<{num_dims}Q", body, shape_at),
        nbytes,
        generation,
        () if kind == EXTERNAL else tuple(map(Extent._make, _EXTENT.iter_unpack(places))),
        b"" if kind == INLINE else unread_digests(content) if lacks_some else content,
        content if kind == INLINE else None,
        1 << shift,
        b"",
        tuple(map(ExternalRange._make, _RANGE.iter_unpack(places))) if kind == EXTERNAL else (),
        kind == PAGED,
    )


def unread_digests(digests: bytes) -> bytes:
    """Return a copy that readers write to: a block whose digest is zeros was never read, and its first reader has it.

    Rows made of parts of a row share its bytes.
    """
    return cast(bytes, memoryview(bytearray(digests)))


def has_unread(row: Row) -> bool:
    """Return whether the digests of ``row`` are of the kind that readers write to."""
    return isinstance(row.digests, memoryview)


def num_unread(row: Row) -> int:
    """Return how many blocks of ``row`` nobody has read."""
    return int(np.count_nonzero(np.frombuffer(row.digests, np.uint64) == 0)) if has_unread(row) else 0


def learn(row: Row, blocks: Any, digests: np.uint64 | NDArray[np.uint64]) -> None:
    """Have ``digests`` as those of ``blocks`` of ``row``, which were read for the first time."""
    np.frombuffer(row.digests, np.uint64)[blocks] = digests


def content_nbytes(nbytes: int, kind: int, shift: int) -> int:
    """Return the bytes behind the places of a row of ``nbytes``: of the tensor itself, or of digests."""
    if kind in (INLINE, PAGED):
        return nbytes if kind == INLINE else 0
    return DIGEST_NBYTES * -(-nbytes >> shift)


def row_problem(row: Row) -> str | None:
    """Return what is wrong with ``row`` by itself, or None."""
    if not 0 < row.key_id < LIMIT or not 0 <= row.generation < LIMIT or not 0 <= row.nbytes < LIMIT:
        return f"key id, generation or size out of range ({row.generation}, {row.nbytes} bytes)"
    if len(row.shape) > MAX_NUM_DIMS:
        return f"{len(row.shape)} dimensions"
    for dim in row.shape:
        if not 0 <= dim < LIMIT:
            return f"a shape of {row.shape}"
    if math.prod(max(dim, 1) for dim in row.shape[1:]) >= LIMIT:  # the first of its strides
        return f"a shape of {row.shape}, whose strides are out of range"
    if row.inline is not None:
        fits = len(row.inline) == row.nbytes <= INLINE_NBYTES and not row.extents and not row.digests
        return None if fits else f"{len(row.inline)} bytes inline for {row.nbytes}, with extents or digests"
    if row.is_paged:
        return "extents or digests beside its pages" if row.extents or row.digests or not row.nbytes else None
    if len(row.digests) != -(-row.nbytes // row.block_nbytes) * DIGEST_NBYTES:
        return f"{len(row.digests)} bytes of digests for {row.num_blocks} blocks"
    return _ranges_problem(row) if row.ranges else extents_problem(row.extents, row.nbytes)


def extents_problem(extents: tuple[Extent, ...], nbytes: int) -> str | None:
    """Return what is wrong with ``extents`` for a record, or a page of one, of ``nbytes``; or None."""
    total = 0
    for _, file, offset, length in extents:  # a loop: of a million rows, most have one
        if length <= 0 or offset < 0 or offset + length >= LIMIT or file < 0:
            return "an extent that is no range of a named file"
        total += length
    return f"extents of {total} bytes for {nbytes}" if total < nbytes else None


def _ranges_problem(row: Row) -> str | None:
    end = 0
    for each in row.ranges:
        if each.start < end or each.nbytes <= 0 or each.start + each.nbytes > row.nbytes:
            return f"bytes in external files that are no ranges of its own, in order: {each}"
        end = each.start + each.nbytes
    return "extents beside bytes in external files" if row.extents else None


def place_problem(row: Row, header: RootHeader, external: Sequence[ExternalFile] = ()) -> str | None:
    """Return the contradiction between ``row`` and the root, or None. ``external`` are the root's files."""
    if row.key_id >= header.next_key_id:
        return f"the next key id is {header.next_key_id}"
    if row.generation > header.generation:
        return f"written for generation {row.generation}, committed is {header.generation}"
    if any(extent.device >= header.num_directories for extent in row.extents):
        return f"an extent outside the store's {header.num_directories} directories"
    for each in row.ranges:
        if each.file >= len(external):
            return f"bytes in an external file that is not among the {len(external)} of the root row"
        if each.offset + each.nbytes > external[each.file].nbytes:
            return f"bytes behind the end of {external[each.file].name!r}: {each}"
    return None


def row_seed(store_uuid: bytes) -> int:
    """Return the seed of the digests of a store's rows."""
    return xxhash.xxh3_64_intdigest(store_uuid)


def _row_digest(key_id: int, body: bytes, seed: int) -> bytes:
    return digest(key_id.to_bytes(8, "little") + body, seed).to_bytes(DIGEST_NBYTES, "little")


# -- spec --------------------------------------------------------------------------------------------------------------


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
        """Return the spec a catalog row names.

        Raises CorruptionError when the row contradicts itself, UsageError for a dtype of a newer torch.
        """
        dtype = _DTYPES.get(row.dtype)
        if dtype is None:
            raise UsageError(
                f"{row.name!r} has a dtype that this torch does not know: {row.dtype!r}, this is torch "
                f"{torch.__version__}; open the store with the torch that wrote it"
            )
        spec = _spec(dtype, row.shape, row.block_nbytes)
        if spec.nbytes != row.nbytes:
            problem = f"{row.nbytes} bytes for shape {row.shape} of {row.dtype}"
            raise CorruptionError(f"the catalog row of {row.name!r} has {problem}", key=row.name)
        return spec


@functools.lru_cache(maxsize=1024)  # of a million keys, most look alike
def _spec(dtype: torch.dtype, shape: tuple[int, ...], block_nbytes: int) -> Spec:
    return Spec(dtype, shape, block_nbytes)
