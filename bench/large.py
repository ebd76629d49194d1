"""Sizes that a test suite has no time for: a million keys in one commit, and a tensor of more than 2 GiB."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import tiered

__all__ = ["run"]

_NUM_KEYS = 1_000_000
_NBYTES = (1 << 31) + 12_345  # beyond what a signed 32-bit size can say, and off every alignment


def million_keys(directory: Path) -> str:
    """Commit a million keys, open them again, and return what is wrong; "" when nothing is."""
    with tiered.Store(directory, dram="256MiB") as store:
        store.put_many((f"key {index}", torch.tensor([index, -index])) for index in range(_NUM_KEYS))
        store.commit({"keys": _NUM_KEYS})
    with tiered.Store(directory, dram="256MiB") as store:
        if len(store) != _NUM_KEYS or store.state != {"keys": _NUM_KEYS}:
            return f"{len(store)} keys, state {store.state}"
        for index in range(0, _NUM_KEYS, 997):
            if store[f"key {index}"].tolist() != [index, -index]:
                return f"key {index} holds {store[f'key {index}']}"
        del store["key 5"]
        store.commit()
        report = store.verify()
        return "" if report.is_clean and report.num_keys == _NUM_KEYS - 1 else f"verify: {report}"


def large_tensor(directory: Path) -> str:
    """Commit one tensor of more than 2 GiB through 64 MiB, read it back, and return what is wrong."""
    value = torch.arange(_NBYTES // 4 + 1, dtype=torch.int32).view(torch.uint8)[:_NBYTES]
    with tiered.Store(directory, dram="64MiB") as store:
        store["large"] = value
        store.commit()
    with tiered.Store(directory, dram="64MiB") as store:
        if not torch.equal(store["large"], value):
            return "the tensor has other bytes"
        report = store.verify()
        return "" if report.is_clean and report.nbytes == _NBYTES else f"verify: {report}"


_CASES: tuple[Callable[[Path], str], ...] = (million_keys, large_tensor)


def run(seed: int) -> str:
    """Run the case of one seed in a directory that goes, and return what is wrong."""
    case = _CASES[seed % len(_CASES)]
    with tempfile.TemporaryDirectory(prefix="large-") as directory:
        wrong = case(Path(directory) / "run")
    return f"{case.__name__}: {wrong}" if wrong else ""
