"""pytest's plugin of the rig: a test fails that asks the fake runtime for something no program of ours should ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.fake_cuda import device

__all__ = ["no_complaints"]


@pytest.fixture(autouse=True)
def no_complaints() -> Iterator[None]:
    """Fail the test that leaves a complaint which it does not take itself."""
    device.complaints()
    yield
    assert device.complaints() == []
