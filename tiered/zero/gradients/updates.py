"""Updates: the rooms below the optimizer see the updates that it has handed over through this."""

from __future__ import annotations

from typing import Protocol

from tiered.zero.parameters.unit import Unit

__all__ = ["NO_UPDATES", "Updates"]


class Updates(Protocol):
    """The pending updates of one model's units; ``NO_UPDATES`` without an optimizer."""

    is_busy: bool  # an update, or the seal of a commit behind it, is pending
    failure: BaseException | None  # the error of an update, not raised yet

    def is_this_thread(self) -> bool:
        """Whether the caller is the update thread."""

    def is_pending(self, unit: Unit) -> bool:
        """Return whether an update of ``unit`` is pending. Any thread, without the lock."""

    def wait_for(self, unit: Unit) -> None:
        """Wait for the update of ``unit``, if one is pending; it goes first. Raises the error of one that failed."""

    def wait_for_all(self) -> None:
        """Wait until nothing is pending. Ends early after a failure."""

    def finish_all(self) -> None:
        """Wait until nothing is pending, and raise the error of an update that failed."""

    def raise_failure(self) -> None:
        """Raise the error of an update that has failed since the last call, if any; the step is abandoned."""

    def cancel(self) -> None:
        """Finish the updates that a commit waits for, drop the rest, forget a failure."""

    def release_gradients(self) -> bool:
        """Give the working set gradients that wait for their update; return whether there were any in DRAM."""

    def ask(self) -> bool:
        """In the update thread: ask the training thread, if it waits for an update, to give memory back."""

    def wait_for_one(self) -> bool:
        """For a caller that waits for memory: wait for the end of an update; False where none is pending."""

    def take_leftovers(self) -> list[str]:
        """Return the gradients' keys that are to be deleted once no caller sees their bytes."""

    def forget(self) -> None:
        """In a forked child: the parent's threads do not run."""


class _NoUpdates:
    """The updates without an optimizer: none is ever pending."""

    is_busy = False
    failure: BaseException | None = None

    def is_this_thread(self) -> bool:
        return False

    def is_pending(self, unit: Unit) -> bool:
        return False

    def wait_for(self, unit: Unit) -> None: ...

    def wait_for_all(self) -> None: ...

    def finish_all(self) -> None: ...

    def raise_failure(self) -> None: ...

    def cancel(self) -> None: ...

    def release_gradients(self) -> bool:
        return False

    def ask(self) -> bool:
        return False

    def wait_for_one(self) -> bool:
        return False

    def take_leftovers(self) -> list[str]:
        return []

    def forget(self) -> None: ...


NO_UPDATES: Updates = _NoUpdates()
