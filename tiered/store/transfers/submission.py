"""Submission: operations handed to their devices, all of them accounted for whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered.bytes.device.base import Device, Operation
from tiered.errors import DeviceError, TieredError

__all__ = ["NotSubmittedError", "submit_all"]


def submit_all(devices: Sequence[Device], operations: Sequence[tuple[int, Operation]]) -> None:
    """Submit operations, each with the number of its device; one that cannot be submitted ends with an error.

    Those of one device are submitted together, in their order. An interrupt is raised: operations handed to a device by
    then may be in flight, and end by themselves; the rest ends with an error.
    """
    by_device: dict[int, list[Operation]] = {}
    handed: set[int] = set()  # devices
    try:
        for index, operation in operations:
            by_device.setdefault(index, []).append(operation)
        for index, group in by_device.items():
            handed.add(index)
            try:
                devices[index].submit(group)
            except (TieredError, OSError, ValueError) as error:  # none of them was started
                _end(group, error)
    except BaseException as error:
        rest = [operation for index, operation in operations if index not in handed]
        _end(rest, NotSubmittedError(error))
        raise


def _end(operations: Iterable[Operation], error: Exception) -> None:
    for operation in operations:
        operation.error = error
        operation.on_done(operation)


class NotSubmittedError(DeviceError):
    """The caller's thread was kept from handing something to its device. It refers to no frames."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(f"it was not handed to the device: {reason!r}")
