"""StateDictCopies: a ``state_dict()`` of a sharded model that is under way, and its copies of parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tiered.bytes.device.base import Device
from tiered.bytes.file_stream import FileMemory
from tiered.bytes.free_memory import free_memory
from tiered.errors import CapacityError
from tiered.units import format_bytes

__all__ = ["StateDictCopies", "memory_for_copies"]

LEAST_IN_FILE_NBYTES = 64 << 20
"""More bytes than these are copied by a ``state_dict`` to a file that the kernel may page out, not to memory."""


class StateDictCopies:
    """The calls of ``state_dict()`` that are under way, each module's inside its parent's.

    ``num_calls`` nest now. ``only_looks``: the calls give meta tensors, and no parameter is read; ``only_gathers``: the
    same, but parameters are gathered for the other ranks. Invariant: outside of the calls there are no copies.
    """

    __slots__ = ("_copies", "_memory", "num_calls", "only_gathers", "only_looks")

    def __init__(self) -> None:
        self._copies: dict[object, torch.Tensor] = {}
        self._memory: FileMemory | None = None
        self.num_calls = 0
        self.only_looks = self.only_gathers = False

    def enter(self, memory: FileMemory | None = None) -> None:
        """A call begins; the copies of the outermost one go to ``memory``, or to ordinary memory."""
        self._memory = memory if self.num_calls == 0 else self._memory
        self.num_calls += 1

    def leave(self) -> None:
        """A call ends; with the outermost one the copies are the caller's alone."""
        self.num_calls -= 1
        if not self.num_calls:
            self.end()

    def end(self) -> None:
        """Forget all calls, also those that an exception has left in the middle."""
        self.num_calls = 0
        self._copies.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def copy(self, segment: Any, values: torch.Tensor) -> torch.Tensor:
        """Return a copy in DRAM of ``values``; as in torch, the names of a tied one share their memory."""
        if self.only_looks or self.only_gathers:
            looks: torch.Tensor = segment.layout()
            return looks.detach()
        if segment not in self._copies:
            values = values.detach()
            copied = values.to("cpu", copy=True) if self._memory is None else self._memory.copy(values)
            self._copies[segment] = copied
        return self._copies[segment].detach()


def memory_for_copies(devices: Sequence[Device], nbytes: Sequence[int], what: str, next_step: str) -> FileMemory | None:
    """Return memory for copies of ``nbytes`` each, None for ordinary memory, where few bytes go.

    Many go to a file beside the store's own, whose pages the kernel takes back: so whatever saves them streams, and
    they take no more memory than there is. Raises CapacityError where neither has room; it names ``next_step``.
    """
    if sum(nbytes) <= LEAST_IN_FILE_NBYTES:
        return None
    device = max(devices, key=lambda device: device.free_bytes())
    try:
        if os.path.isdir(device.name):  # not a device in RAM
            return FileMemory(device.name, nbytes)
        refusal = "the store has no directory for it"
    except (CapacityError, OSError) as error:
        refusal = str(error)
    available = free_memory()
    if sum(nbytes) > available:
        raise CapacityError(
            f"{what} needs {format_bytes(sum(nbytes))}, in a file or in memory: {refusal}, and"
            f" {format_bytes(available)} of memory are available; expected room for all of it: {next_step}"
        )
    return None
