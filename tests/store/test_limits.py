"""Limits of the process: a file that may not grow further is a typed error, and what was committed stays."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.store.rig import numbers
from tiered.errors import CapacityError, DeviceError
from tiered.store.store import Store
from tiered.units import MiB

DRAM = "16MiB"


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let this process write no file beyond ``nbytes``; what would is EFBIG (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_data_files_that_may_not_grow_lose_the_open_generation_only(tmp_path: Path, engine: str) -> None:
    with Store(tmp_path / "run", dram=DRAM, engine=engine) as store:
        store["a"] = numbers(5 * MiB)
        store.commit({"step": 1})
    with pytest.raises(CapacityError) as caught, largest_file(80 * MiB):
        with Store(tmp_path / "run", dram=DRAM, engine=engine) as store:
            for number in range(12):
                store[f"b{number}"] = numbers(8 * MiB, number)
            store.commit({"step": 2})
    assert "File too large" in str(caught.value) and str(tmp_path / "run") in str(caught.value)
    with Store(tmp_path / "run", dram=DRAM, engine=engine) as store:
        assert set(store) == {"a"} and store.state == {"step": 1} and store.verify().is_clean
        assert torch.equal(store["a"], numbers(5 * MiB))
        store["b"] = numbers(70 * MiB)
        store.commit()
        assert store.verify().is_clean


def test_a_catalog_that_may_not_grow_loses_the_open_generation_only(tmp_path: Path) -> None:
    """Beyond the limit SQLite's write fails; whatever it makes of that, the last commit is there."""
    with Store(tmp_path / "run", dram=DRAM) as store:
        store["a"] = numbers(100)
        store.commit({"step": 1})
    with pytest.raises((CapacityError, DeviceError)), largest_file(64 << 10):
        with Store(tmp_path / "run", dram=DRAM) as store:
            store.put_many({f"b{number}": numbers(1000, number) for number in range(200)})
            store.commit({"step": 2})
    with Store(tmp_path / "run", dram=DRAM) as store:
        assert set(store) == {"a"} and store.state == {"step": 1}
        store["b"] = numbers(100, 1)
        store.commit()
