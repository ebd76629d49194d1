"""The identity file, which makes a directory a numbered part of a store.

One line of JSON: format, store, index, number, and a digest, which is xxh3-64 of the other fields as JSON with sorted
keys.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tiered.errors import CorruptionError, UsageError

__all__ = ["Identity"]

_FORMAT = 1
_MAX_NBYTES = 4096
_MAX_NUM_DIRECTORIES = 1 << 16  # the catalog's extents tell no more apart


@dataclass(frozen=True, slots=True)
class Identity:
    """Directory ``index`` of the ``number`` that store ``store_uuid`` (16 bytes) has."""

    store_uuid: bytes
    index: int
    number: int

    def encode(self) -> bytes:
        """Return the file's content."""
        fields = {"format": _FORMAT, "index": self.index, "number": self.number, "store": self.store_uuid.hex()}
        return json.dumps({**fields, "digest": _digest(fields)}).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Identity:
        """Read ``path``; CorruptionError where the contents are damaged, UsageError for a newer format."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, _MAX_NBYTES)
        finally:
            os.close(fd)
        try:
            fields = json.loads(text)
            if fields.pop("digest") != _digest(fields) or not text.endswith(b"}\n"):
                raise ValueError("it does not match its digest")
            if fields["format"] > _FORMAT:
                raise UsageError(
                    f"{path} has format version {fields['format']}; this tiered reads version {_FORMAT}: "
                    "open it with the version of tiered that wrote it"
                )
            identity = cls(bytes.fromhex(fields["store"]), fields["index"], fields["number"])
            numbers = fields["format"], identity.index, identity.number
            if any(type(number) is not int for number in numbers) or fields["format"] != _FORMAT:
                raise ValueError(f"it says {fields}")
            if len(identity.store_uuid) != 16 or not 0 <= identity.index < identity.number <= _MAX_NUM_DIRECTORIES:
                raise ValueError(f"it says {identity}")
            return identity
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptionError(
                f"{path} is damaged ({error}): restore it from a copy of this directory", file=str(path)
            ) from error


def _digest(fields: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
