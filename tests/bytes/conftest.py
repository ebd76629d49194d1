"""An arena and a buffer, checked for leaks."""

from collections.abc import Iterator

import pytest

from tiered.bytes.arena import Arena, Buffer
from tiered.units import KiB, MiB


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * MiB)
    yield arena
    assert arena.leased_nbytes == 0, "a test leaked a buffer"
    arena.close()


@pytest.fixture
def buffer(arena: Arena) -> Iterator[Buffer]:
    buffer = arena.allocate_nowait(64 * KiB)
    assert buffer is not None
    yield buffer
    arena.release(buffer)
