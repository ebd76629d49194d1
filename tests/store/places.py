"""Where tests that open thousands of stores keep them: in memory where that is offered, for its quick flushes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["quick_directory"]

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def quick_directory() -> Iterator[Path]:
    """Give a new directory, removed at the end."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="tiered-") as path:
        yield Path(path)
