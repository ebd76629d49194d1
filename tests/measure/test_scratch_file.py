"""The page cache under a scratch file: pages of a file that is forgotten leave it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np

from tiered.bytes.device.mount import find_mount
from tiered.measure.scratch_file import forget


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
