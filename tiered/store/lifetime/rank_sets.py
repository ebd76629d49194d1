"""Rank sets: the stores of a run's ranks as they lie on the drives, and which set of several is the one to open.

Another number of ranks carries a run over to a set of its own, in directories of its own beside the old ones, and the
first generation that all ranks of the new set have is the switch. So invariant: *of a set and its origin, the set
counts where it has a generation, and else the origin, which nobody has changed.* A store of one rank that lies in the
directories themselves is a set, too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tiered.errors import CorruptionError, UsageError
from tiered.ranks.ranks import Ranks
from tiered.store.catalog.catalog import Alone, Confirmation, GenerationName, Member
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.lifetime.directory import CATALOG_NAME, identities_in, rank_directories, remove_files
from tiered.store.lifetime.lock import LOCK_NAME, Lock

__all__ = [
    "RankSet",
    "StorePlace",
    "current_set",
    "find_place",
    "find_sets",
    "newest_of",
    "numbered",
    "obsolete_in",
    "remove_set",
    "searched_for",
    "stores_in",
]

_OPEN = "tiered.Store"


class RankSet(NamedTuple):
    """The stores of one ``run`` of ``world`` ranks; a store that is of no run has its own identity as the run.

    ``paths``: all directories that are there. ``stores``: by rank, its directories in their order; () for one that is
    missing, or not whole. ``kept``: by rank, the names of its generations. ``is_alone``: a store of one rank that lies
    in the directories themselves.
    """

    run: bytes
    world: int
    origins: tuple[bytes, ...]
    paths: tuple[Path, ...]
    stores: tuple[tuple[Path, ...], ...]
    kept: tuple[tuple[GenerationName, ...], ...]
    is_alone: bool

    @property
    def generation(self) -> GenerationName | None:
        """The newest that all ranks have; None where nothing was committed by all."""
        newest = max(set(self.kept[0]).intersection(*self.kept[1:]), default=None)
        return newest if newest is not None and newest.number else None

    @property
    def may_be_unfinished(self) -> bool:
        """Whether no rank has come further than to the first generation, which is the origin's last."""
        return bool(self.origins) and all(name.number <= 1 for names in self.kept for name in names)

    def check_unchanged(self) -> None:
        """Raise UsageError for stores that have other generations now; they are locked from here on."""
        for store, names in zip(self.stores, self.kept, strict=True):
            with closing(SqliteCatalog(store[0] / CATALOG_NAME, read_only=True)) as catalog:
                if catalog.kept() != names:
                    raise UsageError(
                        f"{store[0]}: another process has committed to the run of {self} since this opening looked at"
                        " it; expected one process group at a time: open it again"
                    )

    def __str__(self) -> str:
        lacking = [str(rank) for rank, store in enumerate(self.stores) if not store]
        numbers = [str(max((name.number for name in names), default=0)) for names in self.kept]
        newest = " and ".join(dict.fromkeys(numbers)) if self.generation is None else str(self.generation.number)
        missing = f", without {', '.join(lacking)}" if lacking else ""
        return f"{self.world} rank{'s' * (self.world > 1)}{missing}, generation {newest} of run {self.run.hex()}"


class StorePlace(NamedTuple):
    """The directories of this rank's store, its confirmation, and the set that it is to be carried over from."""

    paths: Sequence[str | os.PathLike[str]]
    confirmation: Confirmation
    origin: RankSet | None = None


def find_sets(directories: Sequence[Path]) -> list[RankSet]:
    """Return all sets below ``directories``; blocks. Raises CorruptionError, and UsageError for newer formats."""
    found: dict[tuple[bytes, int], dict[int, dict[int, Path]]] = {}
    heads: dict[tuple[bytes, int], tuple[tuple[bytes, ...], bool]] = {}
    numbers: dict[Path, int] = {}
    for path, identity in ((p, i) for directory in directories for p, i in identities_in(directory).items()):
        member = identity.member or Member(identity.store_uuid, 0, 1)
        key = member.run, member.world
        heads[key] = member.origins, identity.member is None
        found.setdefault(key, {}).setdefault(member.rank, {})[identity.index] = path
        numbers[path] = identity.number
    return [
        _set_of(Member(key[0], 0, key[1], heads[key][0]), heads[key][1], places, numbers)
        for key, places in found.items()
    ]


def _whole(places: dict[int, Path], numbers: dict[Path, int]) -> tuple[Path, ...]:
    """Return the directories of a store by their indexes, () for one that is not whole."""
    paths = tuple(places[index] for index in sorted(places))
    is_whole = 0 in places and len(paths) == numbers[places[0]] and (places[0] / CATALOG_NAME).exists()
    return paths if is_whole else ()


def _set_of(first: Member, is_alone: bool, places: dict[int, dict[int, Path]], numbers: dict[Path, int]) -> RankSet:
    """Return the set of ``first``, whose ranks lie in ``places``, by rank and index."""
    stores = tuple(_whole(places.get(rank, {}), numbers) for rank in range(first.world))
    paths = tuple(path for each in places.values() for path in each.values())
    kept: list[tuple[GenerationName, ...]] = []
    for store in stores:
        if store:
            with closing(SqliteCatalog(store[0] / CATALOG_NAME, read_only=True)) as catalog:
                kept.append(catalog.kept())
        else:
            kept.append(())
    return RankSet(first.run, first.world, first.origins, paths, stores, tuple(kept), is_alone)


def newest_of(sets: Sequence[RankSet]) -> RankSet | None:
    """Return the set that counts, None where nothing was committed. Raises CorruptionError where that is unknown."""
    whole = {each.run: each for each in sets if each.generation is not None}
    superseded = {run for each in whole.values() for run in each.origins}
    live = [each for each in whole.values() if each.run not in superseded]
    for each in sets:
        has_commits = any(name.number for names in each.kept for name in names)
        is_unfinished = each.may_be_unfinished and each.origins[0] in whole
        if has_commits and not is_unfinished and each.run not in whole and each.run not in superseded:
            live.append(each)
    if len(live) > 1 or (live and live[0].run not in whole):
        where = "; ".join(f"{next(filter(None, each.stores))[0].parent}: {each}" for each in live)
        raise CorruptionError(
            f"the directories of ranks do not belong together ({where}); expected those of one run, all that have"
            " committed: restore what is missing from a copy, or give other directories"
        )
    return live[0] if live else None


def current_set(searched: Sequence[Path], world: int) -> RankSet | None:
    """Return the set that counts, where one of another number of ranks than ``world`` is there; else None."""
    return newest_of(find_sets(searched)) if any(_is_of_others(path, world) for path in searched) else None


def stores_in(directories: Sequence[str | os.PathLike[str]]) -> list[Sequence[Path]]:
    """Return the directories of each store of the run in ``directories``: those themselves, or those of each rank."""
    searched = [*searched_for(directories, 1)]
    current = current_set(searched, 1)
    return [searched] if current is None or current.is_alone else list(current.stores)


def obsolete_in(directories: Sequence[str | os.PathLike[str]]) -> list[RankSet]:
    """Return the sets that the run in ``directories`` does not need any more, in the order of their removal.

    Each was carried over from, or is what an interrupted switch has left. The oldest come first: the set that counts is
    known by those after it.
    """
    searched = [*searched_for(directories, 1)]
    sets = find_sets(searched) if any(_is_of_others(path, 1) for path in searched) else []
    current = newest_of(sets)
    left = [] if current is None else [each for each in sets if each.run != current.run]
    ordered: list[RankSet] = []
    while left:
        runs = {each.run for each in left}
        ordered += [each for each in left if runs.isdisjoint(each.origins)]
        left = [each for each in left if not runs.isdisjoint(each.origins)]
    return ordered


def remove_set(found: RankSet) -> None:
    """Remove the files and directories of a set for good; blocks. Raises UsageError while a store of it is open."""
    locks: list[Lock] = []
    try:
        locks += [Lock(path, shared=False) for path in found.paths]
        remove_files(found.paths)
        for path in () if found.is_alone else found.paths:
            (path / LOCK_NAME).unlink(missing_ok=True)
            if not any(path.iterdir()):
                path.rmdir()
    finally:
        for lock in locks:
            lock.release()


def find_place(
    paths: Sequence[str | os.PathLike[str]], searched: Sequence[Path], ranks: Ranks | None, mode: str
) -> StorePlace:
    """Return where this rank's store is, or is to be, in ``paths``; blocks for all ranks.

    ``searched``: the directories of all ranks. Where the run there is of another number of ranks, what an interrupted
    switch has left in this rank's directories is removed. Raises UsageError, CorruptionError, on all ranks.
    """
    world = 1 if ranks is None else ranks.world
    has_others = any(_is_of_others(path, world) for path in searched)
    if ranks is not None:
        has_others = not ranks.least(_OPEN, lambda: int(not has_others))
    sets: list[RankSet] = []
    current: RankSet | None = None
    if has_others:
        sets = find_sets(searched)
        if ranks is not None:
            ranks.check_equal(_OPEN, [f"{each} from {each.origins}" for each in sets], _seen_by_all(sets))
        current = newest_of(sets)
    origin = None if current is None or current.world == world else current
    if ranks is None and (not has_others or (current is not None and current.is_alone)):
        return StorePlace(paths, Alone())
    if origin is not None and mode != "a":
        as_many = f"as many ranks: torchrun --nproc-per-node {origin.world}"
        raise UsageError(
            f'mode "{mode}" on a run of {origin}, and there {"are" if world > 1 else "is"} {world} now; expected mode'
            f' "a", which carries it over, or {"another directory" if mode == "x" else as_many}'
        )
    origins = () if origin is None else (origin.run, *(each.run for each in sets if each.run in origin.origins))
    confirmation: Confirmation = (
        Alone(Member(b"", 0, 1, origins)) if ranks is None else RanksConfirmation(ranks, origins)
    )
    assert confirmation.member is not None
    own = rank_directories(paths, confirmation.member)
    if origin is not None:
        _remove_left(own)
    return StorePlace(own, confirmation, origin)


def _is_of_others(path: Path, world: int) -> bool:
    """Return whether a store of another number of ranks is in ``path``, or of one rank among ranks."""
    members = {place: identity.member for place, identity in identities_in(path).items()}
    if members.get(path) is not None:  # the directory of one rank itself, which is refused later
        return False
    worlds = {1 if member is None else member.world for member in members.values()}
    return bool(worlds - {world}) or (world == 1 and bool(members.keys() - {path}))


def _seen_by_all(sets: Sequence[RankSet]) -> str:
    worlds = sorted({each.world for each in sets})
    return (
        "directories that every rank sees, where another number of ranks goes on with a run; with the same number each"
        f" needs its own alone: torchrun --nproc-per-node {worlds[-1] if worlds else 1}"
    )


def _remove_left(paths: Sequence[Path]) -> None:
    """Remove the files of an interrupted switch, or of a set that was carried over from, in ``paths``."""
    for path in paths:
        if path.is_dir():
            lock = Lock(path, shared=False)
            try:
                remove_files([path])
            finally:
                lock.release()


def numbered(directory: str | os.PathLike[str], rank: int, local_rank: int) -> str:
    """Return ``directory`` with the numbers in the places of ``{rank}`` and ``{local_rank}``."""
    return os.fspath(directory).replace("{rank}", str(rank)).replace("{local_rank}", str(local_rank))


def searched_for(directories: Sequence[str | os.PathLike[str]], world: int) -> Iterator[Path]:
    """Yield ``directories`` of all ranks: for each rank where a name has ``{rank}`` or ``{local_rank}``."""
    for directory in directories:
        has_number = numbered(directory, 0, 0) != os.fspath(directory)
        for number in itertools.count():
            path = Path(os.path.realpath(os.path.expanduser(numbered(directory, number, number))))
            if number >= world and not path.exists():
                break
            yield path
            if not has_number:
                break
