"""Limits of the process: a file that may not grow further is a typed error, and what was committed stays."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Let this process map 8 MiB more and not a byte beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 8 * MiB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


GETS: dict[str, Callable[[Store, str], object]] = {
    "get": lambda store, key: store[key],
    "get_many": lambda store, key: store.get_many([key]),
    "read_part": lambda store, key: store.read_part(key, 0, int(key)),
}


@pytest.mark.parametrize("nbytes", [600 * MiB, 300 * MiB])
@pytest.mark.parametrize("how", GETS)
def test_a_get_without_memory_names_the_key_and_reads_in_parts(tmp_path: Path, nbytes: int, how: str) -> None:
    base = tmp_path / "large.safetensors"
    header = f'{{"t":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[0,{nbytes}]}}}}'.encode()
    with open(base, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    with Store(tmp_path / "run", dram=DRAM, external=[base]) as store:
        store.adopt(str(nbytes), base, "t")
        store.read_part(str(nbytes), 0, MiB)
        with no_more_memory(), pytest.raises(CapacityError, match=rf"'{nbytes}': no memory on cpu.*read_part"):
            GETS[how](store, str(nbytes))
        assert store.read_part(str(nbytes), 0, MiB).numel() == MiB
        assert store.working_set.space.used_nbytes == 0
        store.rollback()


def test_a_put_many_of_leases_says_that_they_are_open(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram=DRAM) as store, ExitStack() as leases:
        for number in range(5):
            store[f"a{number}"] = numbers(3 * MiB, number)
        views = {f"b{number}": leases.enter_context(store.lease(f"a{number}")) for number in range(5)}
        with pytest.raises(CapacityError, match=r"put_many, at 'b0': no room for .*'a0'.*leased"):
            store.put_many(views)
        del views
        leases.close()

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for number in range(5):
                with store.lease(f"a{number}") as view:
                    yield f"b{number}", view

        store.put_many(pairs())
        assert all(torch.equal(store[f"b{number}"], numbers(3 * MiB, number)) for number in range(5))


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


SHORT_OF_MEMORY = """
import faulthandler, re, resource, sys, torch, tiered
from tiered.bytes import critical_section
critical_section._START_DEADLINE_S = 0.2
faulthandler.dump_traceback_later(100, exit=True)
sys.unraisablehook = lambda event: None  # threads die of MemoryError before they report
store = tiered.Store(sys.argv[1], dram="8MiB")
for i in range(600):
    store["w"] = torch.full((1000,), float(i))
    nbytes = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (nbytes + (8 << 20) + i * 16384, resource.RLIM_INFINITY))
    store.commit()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store.generation == 600
store.close()
"""


def test_commits_beside_short_memory_end(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path / "s")], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
