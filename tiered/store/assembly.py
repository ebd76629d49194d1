"""Assembly: how the parts of a store are put together, from devices, an arena and a catalog; how they are given back.

Resources are given back by ``close`` or once the store is garbage.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable

from tiered.bytes.condition import Condition
from tiered.bytes.exit_and_fork import this_process
from tiered.errors import CorruptionError, TieredError, UsageError
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import Root
from tiered.store.generations.generations import Generations
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.residency.memory_wait import Callbacks
from tiered.store.residency.residency import Residency
from tiered.store.space.space import Space
from tiered.store.values.streaming import StreamedValues
from tiered.store.values.values import Values
from tiered.store.waiting.deferred_seal import Producers
from tiered.store.waiting.refusals import CallMark, Refusals

__all__ = ["Resources", "assemble", "warn_of_nested_close"]


_log = logging.getLogger("tiered")


class Resources:
    """Threads, descriptors, locks and memory of one store.

    They refer neither to the store nor to objects of its user (models, registered objects, policies).
    """

    def __init__(self, parts: Parts, working_set: Residency) -> None:
        self.name = ", ".join(device.name for device in parts.devices)
        self._process = this_process()
        self._parts = parts
        self._space = working_set.space
        self._working_set = working_set
        self.first: Callable[[], object] = bool  # is called before everything is closed, and refers to no store

    def watch(self, store: object) -> None:
        """Warn, and give everything back without a commit, should ``store`` be garbage before ``give_back``."""
        self._end: weakref.finalize[..., object] = weakref.finalize(store, self._give_back_unclosed)
        self._end.atexit = False  # at the end of the process each part has its own end

    def give_back(self) -> None:
        """Close everything; blocks. Raises DeadlineError while something in flight does not complete: call it again."""
        self.first()
        self._space.close()
        self._parts.close(self._close_arena)
        self._end.detach()

    def _close_arena(self) -> None:
        # Order: under the lock, which keeps finalizers, that a collection may run here, from the arena's own lock.
        with self._working_set.condition:
            try:
                self._working_set.close()
            except Exception:
                if not self._working_set.mark.reason:
                    raise  # else what was cut short is half done, and some memory stays with the process
            self._parts.arena.close()
        self._working_set.reap()

    def _give_back_unclosed(self) -> None:
        if not self._process.is_here:
            return  # nothing of it is the child's to close
        is_idle = self._can_wait() and self._has_committed()  # else a thread may still write
        if is_idle:
            self._working_set.report_dropped()
            try:
                self.give_back()
            except TieredError as error:
                _log.error("the store %s was not closed, and could not be: %s", self.name, error)
        fate = "" if is_idle else ", and its directories stay locked until the process ends"
        warnings.warn(
            f"the store {self.name} was not closed: nothing is committed by that{fate}; close it, as in with"
            " tiered.Store(...) as store",
            ResourceWarning,
            stacklevel=2,
        )

    def _has_committed(self) -> bool:
        """Wait until a sealed generation is durable; return whether that, or its failure, came within the deadline."""
        sealed = self._working_set.sealed
        if sealed is None or sealed.thread is None:
            return True
        sealed.thread.join(self._working_set.deadline_s)
        return not sealed.thread.is_alive()

    def _can_wait(self) -> bool:
        """Whether the calling thread may wait for others, which a finalizer that interrupted them must not."""
        # Up to Python 3.12 threads start and end under this lock, and a collection may run under it.
        threads_lock: threading.Lock | None = getattr(threading, "_shutdown_locks_lock", None)
        is_starting = threads_lock is not None and threads_lock.locked()
        return not is_starting and not self._working_set.refusals.nested_calls.is_inside()


def warn_of_nested_close(name: str) -> None:
    """Warn that a call of close() has closed nothing: it came in the middle of another call, in the same thread."""
    warnings.warn(
        f"close() of {name} came from a finalizer or a signal handler that interrupted a call of it in this thread:"
        " nothing was closed; close it where the program is done with it",
        ResourceWarning,
        stacklevel=5,
    )


# -- assembly ----------------------------------------------------------------------------------------------------------


def assemble(
    parts: Parts, callbacks: Callbacks, *, is_read_only: bool, deadline_s: float
) -> tuple[Residency, StreamedValues, Values, Generations, Resources]:
    """Load the catalog and put a store together around ``parts``; where that fails they are closed.

    ``callbacks`` are the store's, to which the working set refers weakly.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(parts.close, parts.arena.close)
        root, rows, is_before = _load(parts)
        if root.num_directories != len(parts.devices):
            raise UsageError(f"the store has {root.num_directories} directories, got {len(parts.devices)}")
        parts.external.match(root, rows)
        condition = Condition()
        refusals = Refusals(condition, CallMark(), is_read_only=is_read_only)
        space = Space(
            parts.devices,
            root.store_uuid,
            condition,
            deadline_s=deadline_s,
            spared_nbytes=parts.spared_nbytes,
            external=parts.external.device,
            external_indices=parts.external.indices,
        )
        working_set = Residency(
            parts.arena,
            space,
            condition,
            root,
            read_pages=None if parts.catalog is None else parts.catalog.pages,
            durable=parts.catalog is not None,
            deadline_s=deadline_s,
            refusals=refusals,
            callbacks=callbacks,
        )
        working_set.load(rows)
        streams, generations = StreamedValues(working_set), Generations(working_set, parts, root, Producers())
        resources = Resources(parts, working_set)
        # Order: last, for a store that is refused is not written to, and no generation is given up for one that cannot
        # be opened: its catalog or files are damaged, or an external file is missing.
        if parts.catalog is not None and is_before and not is_read_only:
            parts.catalog.discard()  # durable before anything else is written
        parts.ledgers.start()
        undo.pop_all()
    return working_set, streams, Values(working_set, streams), generations, resources


def _load(parts: Parts) -> tuple[Root, CommittedRows, bool]:
    """Return the generation that all have, and whether one came after it, which is to be given up."""
    catalog = parts.catalog
    if catalog is None:
        return empty_root(bytes(16), len(parts.devices)), CommittedRows.empty(), False
    kept = catalog.kept()
    chosen = parts.confirmation.choose(kept)
    if chosen not in kept:
        message = f"catalog {catalog.name}: it has the generations {kept}, and not {chosen}"
        raise CorruptionError(message, file=catalog.name)
    return *catalog.load(chosen.number), chosen != kept[0]
