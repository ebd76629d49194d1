"""SimulatedRegistrar: how a store's memory is page-locked where the accelerator is the simulated one."""

from __future__ import annotations

import torch

from tests.accelerator import simulated

__all__ = ["SimulatedRegistrar"]


class SimulatedRegistrar:
    """The simulated device's way to lock pages."""

    def register(self, address: int, nbytes: int, index: int) -> None:
        with torch.accelerator.device_index(index):
            simulated.host_register(address, nbytes)

    def unregister(self, address: int, index: int) -> None:
        with torch.accelerator.device_index(index):
            simulated.host_unregister(address)
