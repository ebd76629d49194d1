"""Damage: the findings of ``verify``, and the one way to drop a committed key whose bytes are damaged.

Finding is in streaming.py. Nothing is dropped here that the caller did not name and that is not damaged now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import CorruptionError, UsageError
from tiered.store.format.row import part_of
from tiered.store.generations.generations import Generations
from tiered.store.residency.working_set import WorkingSet
from tiered.store.values.streaming import StreamedValues
from tiered.units import format_bytes

__all__ = ["DroppedKey", "drop_damaged"]


@dataclass(frozen=True, slots=True)
class DroppedKey:
    """A damaged key that is gone: its size, the (file, offset, nbytes) of its extents, and its damage."""

    name: str
    nbytes: int
    places: tuple[tuple[str, int, int], ...]
    errors: tuple[CorruptionError, ...]

    def __str__(self) -> str:
        where = ", ".join(f"{file} at offset {offset}, {nbytes:,} bytes" for file, offset, nbytes in self.places)
        return f"dropped {self.name!r}: {format_bytes(self.nbytes)} in {where}"


@uninterrupted
def drop_damaged(
    working_set: WorkingSet, streams: StreamedValues, generations: Generations, keys: Iterable[str]
) -> tuple[DroppedKey, ...]:
    """Drop ``keys`` in a commit of their own, and return their descriptions; see ``Store.drop_damaged``."""
    if isinstance(keys, str):
        raise TypeError(f"drop_damaged: expected several keys, got the text {keys!r}; pass [{keys!r}]")
    names = list(dict.fromkeys(keys))
    working_set.check(writing=True)
    generations.refuse_company("drop_damaged")
    unknown = [name for name in names if name not in working_set.records]
    if unknown:
        raise UsageError(f"drop_damaged: the store has no key {_listed(unknown)}; nothing was dropped")
    errors = streams.verify(names).errors
    sound = [name for name in names if not any(error.key == name for error in errors)]
    if sound:
        raise UsageError(
            f"drop_damaged: {_listed(sound)} {'is' if len(sound) == 1 else 'are'} not damaged, every byte is what was "
            "written; nothing was dropped. Only what verify reports can be dropped: delete sound keys with del"
        )
    dropped = tuple(_dropped(working_set, name, errors) for name in names)
    if names:
        working_set.delete(names)
        generations.commit_as_is()
        generations.wait()
    return dropped


def _dropped(working_set: WorkingSet, name: str, errors: Iterable[CorruptionError]) -> DroppedKey:
    with working_set.condition:
        entry = working_set.records.peek(name)
        assert entry is not None and entry.committed is not None, name
        row = entry.committed
    extents = part_of(row, 0, row.num_blocks).extents if row.is_paged else row.extents
    devices = working_set.space.devices
    places = [(devices[extent.device].path(extent.file), extent.offset, extent.nbytes) for extent in extents]
    external, indices = working_set.space.external, working_set.space.external_indices
    if external is not None:
        places += [(external.path(indices[each.file]), each.offset, each.nbytes) for each in row.ranges]
    return DroppedKey(name, row.nbytes, tuple(places), tuple(error for error in errors if error.key == name))


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
