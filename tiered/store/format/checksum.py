"""The digest of a block, and the seed that ties it to one place and time.

A record's bytes are cut into blocks; each has its own digest, kept in the catalog, apart from the data. The seed names
the store, the key, the block and the generation: bytes that belong elsewhere, or to an older write of the same place,
do not match.
"""

import struct
from collections.abc import Iterable

import xxhash

from tiered.units import MiB, divide_up

__all__ = [
    "BLOCK_NBYTES",
    "DIGEST_NBYTES",
    "MAX_BLOCK_SHIFT",
    "MIN_BLOCK_SHIFT",
    "PAGE_BLOCKS",
    "block_digests",
    "block_seed",
    "digest",
    "num_blocks",
    "scattered_digests",
]

BLOCK_NBYTES = 4 * MiB
"""The largest unit under one digest, and the default; part of the disk format. A record's last block may be shorter."""

MIN_BLOCK_SHIFT, MAX_BLOCK_SHIFT = 12, 22
"""A record's blocks are of 2**12 to 2**22 bytes."""

PAGE_BLOCKS = 1024
"""Blocks of a page, which is then at most 39 KiB; records of more blocks, or of blocks written for several generations,
have their extents and digests in pages. Part of the disk format."""

DIGEST_NBYTES = 8
"""Bytes of one digest in a catalog row, little-endian."""

_PLACE = struct.Struct("<QQQ")  # key id, block, generation


def block_seed(store_uuid: bytes, key_id: int, block: int, generation: int) -> int:
    """Return the 64-bit seed of one block's digest; ``generation`` is the one that the block was written for."""
    return xxhash.xxh3_64_intdigest(store_uuid + _PLACE.pack(key_id, block, generation))


def digest(memory: bytes | bytearray | memoryview, seed: int) -> int:
    """Return xxh3-64 of ``memory`` (contiguous bytes) under ``seed``, an int below 2**64."""
    return xxhash.xxh3_64_intdigest(memory, seed)


def block_digests(
    memory: memoryview, store_uuid: bytes, key_id: int, block_nbytes: int, first_block: int, generation: int
) -> bytes:
    """Return the digests of the blocks in ``memory``, which begins with ``first_block``; each of them 8 bytes."""
    if len(memory) <= block_nbytes:
        seed = block_seed(store_uuid, key_id, first_block, generation)
        return xxhash.xxh3_64_intdigest(memory, seed).to_bytes(DIGEST_NBYTES, "little") if len(memory) else b""
    found = bytearray()
    for start in range(0, len(memory), block_nbytes):
        seed = block_seed(store_uuid, key_id, first_block + start // block_nbytes, generation)
        found += xxhash.xxh3_64_intdigest(memory[start : start + block_nbytes], seed).to_bytes(DIGEST_NBYTES, "little")
    return bytes(found)


def scattered_digests(
    memory: memoryview,
    store_uuid: bytes,
    key_id: int,
    blocks: Iterable[tuple[int, int, int, int]],
) -> list[int]:
    """Return the digest of each of ``blocks``: its first byte in ``memory``, how many, its number, its generation."""
    hashed, pack = xxhash.xxh3_64_intdigest, _PLACE.pack  # bound once: a row of 4 KiB takes 1.5 us
    return [
        hashed(memory[start : start + nbytes], hashed(store_uuid + pack(key_id, block, generation)))
        for start, nbytes, block, generation in blocks
    ]


def num_blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return how many blocks of ``block_nbytes`` a record of ``nbytes`` has."""
    return divide_up(nbytes, block_nbytes)
