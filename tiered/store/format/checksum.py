"""The digest of a block, and the seed that ties it to one place and time.

A record's bytes are cut into blocks of 4 MiB; each has its own digest, kept in the key's catalog row, apart from the
data. The seed names the store, the key, the block and the generation: bytes that belong elsewhere, or to an older
write of the same place, do not match.
"""

import struct

import xxhash

from tiered.units import MiB, divide_up

__all__ = ["BLOCK_NBYTES", "DIGEST_NBYTES", "block_seed", "digest", "num_blocks"]

BLOCK_NBYTES = 4 * MiB
"""The largest unit under one digest; part of the disk format. The last block of a record is as short as it needs."""

DIGEST_NBYTES = 8
"""Bytes of one digest in a catalog row, little-endian."""

_PLACE = struct.Struct("<QQQ")  # key id, block, generation


def block_seed(store_uuid: bytes, key_id: int, block: int, generation: int) -> int:
    """Return the 64-bit seed of one block's digest; ``generation`` is the one that the block was written for."""
    return xxhash.xxh3_64_intdigest(store_uuid + _PLACE.pack(key_id, block, generation))


def digest(memory: bytes | bytearray | memoryview, seed: int) -> int:
    """Return xxh3-64 of ``memory`` (contiguous bytes) under ``seed``, an int below 2**64."""
    return xxhash.xxh3_64_intdigest(memory, seed)


def num_blocks(nbytes: int) -> int:
    """Return how many blocks a record of ``nbytes`` has."""
    return divide_up(nbytes, BLOCK_NBYTES)
