"""A store as format version 1 has it, packed beside this file: what it holds, and the script that made it.

usage: python -m tests.store.format_1    makes format_1.tar.xz; only ever for a format that no release has written yet
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__ = ["DIRECTORIES", "GENERATION", "STATE", "Counted", "contents", "unpack"]

ARCHIVE = Path(__file__).with_suffix(".tar.xz")
DIRECTORIES = ("a", "b")
GENERATION = 3
STATE: dict[str, Any] = {
    "step": 3, "more": [1.5, None, True, "ü\ud800", (1, 2), b"\0\xff", float("-inf"), 1 << 80, {3: "three"}],
    "tensor": torch.arange(5),
}  # fmt: skip


class Counted:
    """Registered as "counted"."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def contents() -> dict[str, torch.Tensor]:
    """Return what the store holds: every way of keeping a tensor, every kind of name."""
    held = {
        "inline": _bytes(100, 1), "largest inline": _bytes(KiB, 2), "smallest paged": _bytes(KiB + 1, 3),
        "pages": _bytes(8 * KiB, 4), "odd": _bytes(5001, 5), "": _bytes(4 * KiB, 6), "../x": _bytes(3, 7),
        "n\0l": _bytes(9000, 8), "\ud800": _bytes(70, 9), "k" * 10_000: _bytes(6000, 10),
        "blocks": _bytes(5000, 11).repeat(1700)[: 8 * MiB + 5],  # two of 4 MiB, and a short one
        "matrix": _bytes(6 * KiB, 12).view(torch.bfloat16).reshape(32, 96),
        "cube": _bytes(24 * KiB, 13).view(torch.float32).reshape(16, 3, 128),
        "nothing": torch.empty(0), "no rows": torch.empty(0, 7, dtype=torch.float64), "scalar": torch.tensor(2.5),
        "flags": _bytes(2000, 14) > 127,
    }  # fmt: skip
    for dtype in (torch.int64, torch.float16, torch.complex64, torch.float8_e4m3fn, torch.uint16):
        held[str(dtype)] = _bytes(480, 15).view(dtype)
    return held


def unpack(place: Path) -> list[Path]:
    """Put a copy of the store into ``place`` and return its directories."""
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            path = place / member.name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(source.read())
    return [place / name for name in DIRECTORIES]


def _bytes(nbytes: int, seed: int) -> torch.Tensor:
    """Return (nbytes,) uint8 that no library's random numbers decide."""
    words = (hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(-(-nbytes // 32)))
    return torch.frombuffer(bytearray(b"".join(words)[:nbytes]), dtype=torch.uint8)


def _make(place: Path) -> list[Path]:
    """Make the store: superseded extents and deleted keys behind it, the last generation as ``contents`` says."""
    directories = [place / name for name in DIRECTORIES]
    final = contents()
    with Store(*directories, dram="16MiB") as store:
        store.register("counted", Counted(42))
        store.put_many({name: torch.full((3000,), 7.0) for name in [*final, "deleted"]})
        store.commit({"step": 1})
        store.put_many({name: value for name, value in final.items() if name < "n"})
        del store["deleted"]
        store.commit({"step": 2})
        store.put_many({name: value for name, value in final.items() if not name < "n"})
        store.commit(STATE)
        ends = [[e.offset + e.nbytes for r in store.records() for e in r.extents if e.device == i] for i in (0, 1)]
    for directory, each in zip(directories, ends, strict=True):
        os.truncate(directory / "data-000", max(each))
    return directories


def _pack(directories: list[Path]) -> None:
    with tarfile.open(ARCHIVE, "x:xz", format=tarfile.USTAR_FORMAT) as archive:
        for directory in directories:
            for path in sorted(directory.iterdir()):
                member = tarfile.TarInfo(f"{directory.name}/{path.name}")
                content = path.read_bytes()
                member.size, member.mode = len(content), 0o600
                archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        _pack(_make(Path(made)))
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes", file=sys.stderr)
