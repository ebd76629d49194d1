"""Adopted keys: records whose bytes lie in the user's own files, and are read there."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.store.format.row import MAX_NUM_DIMS, ExternalRange, Spec
from tiered.store.records.records import adopted
from tiered.store.residency.working_set import WorkingSet

__all__ = ["adopt"]


@uninterrupted
def adopt(working_set: WorkingSet, key: str, spec: Spec, ranges: Sequence[ExternalRange]) -> None:
    """Make ``key`` a tensor of ``spec`` whose bytes are those of ``ranges``, ascending, and zeros between; no I/O.

    An existing one is replaced. A write to it later, by a put or a lease, gives it bytes of the store's own. Raises
    UsageError for one without bytes there, or with more dimensions than a row holds.
    """
    working_set.check(writing=True)
    if not ranges or not spec.nbytes:
        raise UsageError(f"adoption of {key!r}: it has no bytes in an external file; put it instead")
    if len(spec.shape) > MAX_NUM_DIMS:  # order: before a commit has it, which would be lost
        raise UsageError(
            f"adoption of {key!r}: it has {len(spec.shape)} dimensions, of which a catalog row holds {MAX_NUM_DIMS}; "
            "put it instead, flattened"
        )
    while True:
        with working_set.mark:
            working_set.deferred_seal.settle()
        with working_set.mark, working_set.condition:
            old = working_set.keys.settled(key, "adoption")
            if working_set.deferred_seal.is_closed:  # a commit without it was asked for meanwhile
                continue
            entry = working_set.keys.replace(old, key, spec, scratch=not working_set.records.durable)
            adopted(working_set.records, entry, tuple(ranges))
            return
