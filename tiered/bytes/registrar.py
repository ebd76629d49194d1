"""Registrars: how memory of ours is page-locked for an accelerator, by the type of its device.

The only place outside the kernels that knows a vendor's runtime. pinned_arena.py decides what is page-locked and when.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tiered.errors import DeviceError, UsageError

__all__ = ["CudaRegistrar", "NoRegistrar", "Registrar", "add_registrar", "registrar_for"]

_UNLOADING = 4  # cudaErrorCudartUnloading: the process ends, and its registrations with it


class Registrar(Protocol):
    """Page-locks memory, so that a device copies to and from it beside the host's work."""

    def register(self, address: int, nbytes: int, index: int) -> None:
        """Page-lock ``nbytes`` at ``address`` by device ``index``; blocks while they are faulted in. Raises why not."""

    def unregister(self, address: int, index: int) -> None:
        """End the registration at ``address``, before its memory is unmapped. Raises an error that says why not."""


class NoRegistrar:
    """Refuses: nothing is known that page-locks memory for devices of ``device_type``."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def register(self, address: int, nbytes: int, index: int) -> None:
        raise UsageError(
            f"no registrar is known for devices of type {self._device_type!r} (tiered.bytes.registrar.add_registrar"
            " adds one)"
        )

    def unregister(self, address: int, index: int) -> None:
        raise AssertionError("nothing was registered")


class CudaRegistrar:
    """CUDA, and ROCm under the same names, by way of torch's binding of the runtime. Sets up the device it is given.

    Not tried without a card: whether an error of the runtime is cleared for good, and how long registration takes.
    """

    def register(self, address: int, nbytes: int, index: int) -> None:
        with torch.accelerator.device_index(index):  # the runtime sets up whichever device is current
            cudart = _cudart()
            # Flags 0: with unified addresses memory is registered for all devices of the process.
            result = int(cudart.cudaHostRegister(address, nbytes, 0))
            if result:
                _forget_error(cudart)
                raise DeviceError(f"cudaHostRegister of {nbytes:,} bytes failed: {_reason(cudart, result)}")

    def unregister(self, address: int, index: int) -> None:
        with torch.accelerator.device_index(index):
            cudart = _cudart()
            result = int(cudart.cudaHostUnregister(address))
            if result and result != _UNLOADING:
                _forget_error(cudart)
                raise DeviceError(f"cudaHostUnregister failed: {_reason(cudart, result)}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it


def _reason(cudart: Any, result: int) -> str:
    return f"CUDA error {result}, {cudart.cudaGetErrorString(cudart.cudaError(result))}"


def _forget_error(cudart: Any) -> None:
    """Clear the runtime's last error, which the next launch of a kernel would report as its own."""
    if hasattr(cudart, "cudaGetLastError"):  # not in torch 2.11 to 2.13
        cudart.cudaGetLastError()
        return
    try:
        torch.zeros(1, dtype=torch.uint8, device="cuda")  # torch takes the error from the runtime as it launches this
    except RuntimeError:
        pass


_registrars: dict[str, Registrar] = {"cuda": CudaRegistrar()}


def add_registrar(device_type: str, registrar: Registrar) -> None:
    """Have ``registrar`` page-lock the memory of stores opened from now on for devices of ``device_type``."""
    _registrars[device_type] = registrar


def registrar_for(device_type: str) -> Registrar | None:
    """Return the registrar for devices of ``device_type``; None where none is known."""
    return _registrars.get(device_type)
