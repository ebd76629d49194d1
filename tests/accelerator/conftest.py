"""The simulated accelerator, enabled for one test, and without a race that the test did not ask for."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.accelerator import simulated
from tiered.bytes.registrar import add_registrar


class _Registrar:
    """The simulated device's way to lock pages."""

    def register(self, address: int, nbytes: int) -> None:
        simulated.host_register(address, nbytes)

    def unregister(self, address: int) -> None:
        simulated.host_unregister(address)


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """Enable the device for the test; races that the test does not take itself fail it."""
    if simulated.refusal() is not None:
        pytest.skip(str(simulated.refusal()))
    simulated.enable()
    add_registrar("sim", _Registrar())
    try:
        yield simulated
        assert simulated.races() == []
    finally:
        simulated.disable()
