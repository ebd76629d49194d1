"""Where tests that open thousands of stores keep them: in memory where that is offered, for its quick flushes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.store.space import extents
from tiered.units import MiB

__all__ = ["quick_directory", "short_files"]

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_FREE_NBYTES = 512 * MiB  # more than any of these tests fills; containers may have 64 MiB


@contextmanager
def quick_directory() -> Iterator[Path]:
    """Give a new directory, removed at the end."""
    is_offered = os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free >= _LEAST_FREE_NBYTES
    parent = _SHARED_MEMORY if is_offered else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="tiered-") as path:
        yield Path(path)


@contextmanager
def short_files() -> Iterator[None]:
    """Let files grow by 1 MiB at least, not by 64: in memory, where pages are cleared, that takes 23 ms of CPU time."""
    saved = extents.GROWTH_NBYTES
    extents.GROWTH_NBYTES = MiB
    try:
        yield
    finally:
        extents.GROWTH_NBYTES = saved
