"""Estate: what an open store has taken from the system, and how it is given back: by close, or once nobody has it.

What is committed before, and who is asked, is in generations.py.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref

from tiered.bytes.condition import Condition
from tiered.errors import TieredError
from tiered.store.lifetime.dropping import drop
from tiered.store.lifetime.opening import Parts
from tiered.store.lifetime.origin import origin
from tiered.store.records.records import Records
from tiered.store.residency.residents import Residents
from tiered.store.space.space import Space

__all__ = ["Estate"]

_log = logging.getLogger("tiered")


class Estate:
    """Threads, descriptors, locks and memory of one store.

    It refers neither to the store nor to what a user gives one (models, registered objects, policies): where these are
    gone, the store closed or not, the estate is what is left of it.
    """

    def __init__(
        self, parts: Parts, space: Space, residents: Residents, records: Records, condition: Condition
    ) -> None:
        self.name = ", ".join(device.name for device in parts.devices)
        self.origin = origin()
        self._pid = os.getpid()
        self._parts = parts
        self._space = space
        self._residents = residents
        self._records = records
        self._condition = condition
        self._watch: weakref.finalize[..., object] | None = None

    def watch(self, store: object) -> None:
        """Give everything back, in a thread, and warn, should ``store`` be gone before ``give_back``."""
        self._watch = weakref.finalize(store, self._drop)
        self._watch.atexit = False  # at the end of the process each part has its own end

    def give_back(self) -> None:
        """Close everything; blocks. Raises DeadlineError while something in flight does not complete: call it again."""
        self._space.close()
        self._parts.close(self._close_arena)
        if self._watch is not None:
            self._watch.detach()

    def _close_arena(self) -> None:
        with self._condition:  # which keeps finalizers, that a collection may run here, from the arena's own lock
            self._residents.close()
            self._parts.arena.close()
        self._residents.reap()

    def _drop(self) -> None:
        if self._pid != os.getpid():
            return  # nothing of it is the child's to close
        drop(self._end)
        warnings.warn(
            f"the store {self.name}, opened at {self.origin}, was not closed: nothing is committed by that; close it, "
            "as in with tiered.Store(...) as store",
            ResourceWarning,
            stacklevel=2,
        )

    def _end(self) -> None:
        sealed = self._records.sealed
        if sealed is not None and sealed.thread is not None:
            sealed.thread.join()  # what was sealed becomes durable
        self._records.report_dropped()
        try:
            self.give_back()
        except TieredError as error:
            _log.error(
                "the store %s, opened at %s, was not closed, and could not be: %s", self.name, self.origin, error
            )
