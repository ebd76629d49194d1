"""The simulated accelerator, enabled for one test, and without a race that the test did not ask for."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.accelerator import simulated


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """Enable the device for the test; races that the test does not take itself fail it."""
    if simulated.refusal() is not None:
        pytest.skip(str(simulated.refusal()))
    simulated.enable()
    try:
        yield simulated
        assert simulated.races() == []
    finally:
        simulated.disable()
