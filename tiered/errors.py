"""Every error that tiered raises of its own, in one tree split by the one who can mend it: user, machine or data.

Wrong arguments are ValueError or TypeError, a missing key is KeyError. A message names the failure and its object, the
expected and the actual value, and the next step.
"""

__all__ = [
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "DeadlineError",
    "DeviceError",
    "LeaseError",
    "RankLostError",
    "StepAbandonedError",
    "StoreLostError",
    "TieredError",
    "UsageError",
]


class TieredError(Exception):
    """Anything that tiered itself refuses or reports."""


class UsageError(TieredError):
    """The caller asked for something at the wrong time or place; the caller can mend it."""


class LeaseError(UsageError):
    """A lease is in the way, or outlived its block."""


class StepAbandonedError(UsageError):
    """A training step was left half done; only rollback(), resume() and close() remain."""


class ClosedError(UsageError):
    """The store or device is closed."""


class CapacityError(TieredError):
    """Too little DRAM budget, device space or compute-device memory; a larger one mends it."""


class DeviceError(TieredError):
    """The device failed: an I/O error, a failed flush, a device that is gone."""


class DeadlineError(DeviceError):
    """An operation did not complete in time; its buffer and extent stay quarantined until it does."""


class RankLostError(DeviceError):
    """Another rank is gone, or did not come in time to a collective that needs it.

    ``rank`` is its number in the group, ``place`` the last that is known of what it did ("" where nothing is). Buffers
    of a collective that was under way stay quarantined to the end of the process.
    """

    def __init__(self, message: str, *, rank: int = -1, place: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.place = place


class StoreLostError(DeviceError):
    """A store without commits failed after its first write: its content is gone."""


class CorruptionError(TieredError):
    """Bytes read are not the bytes written.

    ``key`` is the record's name ("" for the catalog itself), ``file`` the path, ``offset`` the byte offset in the file
    (-1 where the file has no meaningful offset). ``errno`` is the drive's error where ``verify`` found a sector that
    gives no bytes at all, else 0. ``row`` is the first row of a table that has bytes in the damaged block, where rows
    were read, else -1.
    """

    def __init__(
        self, message: str, *, key: str = "", file: str = "", offset: int = -1, errno: int = 0, row: int = -1
    ) -> None:
        super().__init__(message)
        self.key = key
        self.file = file
        self.offset = offset
        self.errno = errno
        self.row = row
