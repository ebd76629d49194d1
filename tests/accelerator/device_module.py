"""``torch.sim``: what PyTorch asks of a device type in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

__all__ = ["device_module"]


def device_module(generators: Sequence[torch.Generator], is_enabled: Callable[[], bool]) -> ModuleType:
    """Return ``torch.sim``; ``generators`` are the devices' default ones, ``is_enabled()`` says if these are there.

    As with CUDA, a function whose caller names no device is about the thread's current one.
    """
    module: Any = ModuleType("torch.sim")

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def seed_all(seed: int | None = None) -> None:
        first = generators[0].seed() if seed is None else seed
        for generator in generators:
            generator.manual_seed(first)

    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.is_available = is_enabled
    module.is_initialized = is_enabled
    module.device_count = lambda: len(generators) * is_enabled()
    module.current_device = index_of
    module.set_device = lambda device: torch.accelerator.set_device_index(index_of(device))
    module.get_device_name = lambda device=None: "a simulated accelerator"
    module.synchronize = torch.accelerator.synchronize
    module.current_stream = torch.accelerator.current_stream
    module.Stream = lambda device="sim", **options: torch.Stream(device=device, **options)
    module.stream = lambda stream: stream  # a torch.Stream is a block of its own
    module.Event = lambda **options: torch.Event(device="sim", **options)
    module._initialized = True  # a checkpoint keeps the states of generators of such a device alone
    module._lazy_init = lambda: None  # torch 2.11 synchronizes a device that was initialized by this, and no other
    module._is_in_bad_fork = lambda: not is_enabled()  # then torch.manual_seed seeds nothing here
    module.default_generators = tuple(generators)
    module.manual_seed = lambda seed: generators[index_of()].manual_seed(seed)
    module.seed = lambda: generators[index_of()].seed()
    module.manual_seed_all = module.seed_all = seed_all
    module.initial_seed = lambda: generators[index_of()].initial_seed()
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
