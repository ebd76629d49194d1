"""The accelerator of this process, as far as its type and the states of its random number generators go."""

from __future__ import annotations

import torch

__all__ = ["accelerator_type", "describe_device", "generator_states", "set_generator_states"]


def accelerator_type() -> str:
    """Return the type of this process's accelerator, "" where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type


def describe_device(device: torch.device) -> str:
    """Return the name of ``device`` and, where its driver tells, that of the card."""
    name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"


def generator_states() -> list[torch.Tensor]:
    """Return the state of each device's generator, in the devices' order; none without an accelerator."""
    word = accelerator_type()
    if not word:
        return []
    module = torch.get_device_module(word)
    return [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_generator_states(states: list[torch.Tensor]) -> None:
    """Set the devices' generators to ``states``; those of devices that are not there are left out."""
    num_devices = torch.accelerator.device_count() if states else 0
    for index, state in enumerate(states[:num_devices]):
        torch.get_device_module(accelerator_type()).set_rng_state(state, index)
