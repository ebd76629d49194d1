"""A scratch file is written whole and has no name; pages of a file that is forgotten leave the page cache."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np

from tiered.bytes.device.mount import find_mount
from tiered.tools.bench.rounds import ScratchFile, forget
from tiered.units import MiB


def resident_pages(file: Path) -> int:
    """Return how many pages of ``file`` the page cache holds."""
    with file.open("rb") as opened:
        mapped = np.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    states = ctypes.create_string_buffer(len(mapped) // mmap.PAGESIZE)
    address, nbytes = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
    assert ctypes.CDLL(None).mincore(address, nbytes, states) == 0
    return sum(state & 1 for state in states.raw)


def test_a_file_that_is_forgotten_leaves_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(8 * mmap.PAGESIZE))
    assert resident_pages(file) == 8
    forget(str(file))
    mount = find_mount(tmp_path)
    is_memory = mount is not None and mount.kind == "memory"  # where the page cache is all there is
    assert resident_pages(file) == (8 if is_memory else 0)


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, engine="threads", memory_nbytes=8 * MiB, file_nbytes=11 * MiB) as scratch:
        scratch.write_file()
        assert scratch.device.files() == {-1: 12 * MiB}
        assert scratch.device.statistics().write_bytes == 12 * MiB
        assert scratch.memory == Path(scratch.path).read_bytes()[: 8 * MiB]
    assert not list(tmp_path.iterdir())
