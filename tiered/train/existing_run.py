"""ExistingRun: the run that directories hold already; how to load, check and remove it.

Only ``remove_store`` changes anything, and only files that a store owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiered
from tiered.bytes.private_file import fsync_directory
from tiered.console.page import say
from tiered.console.question import confirm
from tiered.errors import CorruptionError, UsageError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root
from tiered.store.format.row import Row
from tiered.store.generations.registry import committed_state
from tiered.store.lifetime.directory import CATALOG_NAME, Directories, owned_files
from tiered.store.lifetime.ledger import LEDGER_NAME
from tiered.store.lifetime.lock import LOCK_NAME
from tiered.units import MiB, format_bytes

__all__ = [
    "ExistingRun",
    "check",
    "find_run",
    "holds_any_file",
    "holds_store",
    "load_newest",
    "printable",
    "remove_store",
]

_OF_A_MODEL = "model/"  # keys that a training run cannot go on without
_LONGEST_NAME = 120  # characters of a key that a line has


@dataclass(frozen=True, slots=True)
class ExistingRun:
    """The last commit of a store."""

    state: dict[str, Any]
    generation: int


def holds_store(directories: Sequence[Path]) -> bool:
    """Return whether any of ``directories`` holds a store that has come to a catalog, or the remains of one."""
    return any(entry.name.startswith((CATALOG_NAME, "data-")) for path in directories for entry in owned_files(path))


def holds_any_file(directories: Sequence[Path]) -> bool:
    """Return whether any of ``directories`` holds a file of a store, even of an interrupted creation."""
    return any(True for path in directories for _ in owned_files(path))


def find_run(directories: Sequence[Path]) -> ExistingRun | None:
    """Return the last commit of the store in ``directories``, None where it has not committed anything.

    Raises UsageError for anything but exactly one store, and while a writer has it open; CorruptionError for a damaged
    catalog.
    """
    if not any((path / CATALOG_NAME).exists() for path in directories):
        return None
    locked = Directories.open(directories, "r")
    try:
        root, _, _ = load_newest(directories)
    finally:
        locked.close()
    return ExistingRun(committed_state(root.state)[0], root.generation) if root.generation else None


def check(
    directories: Sequence[Path], drop: Sequence[str] = (), *, external: Sequence[Path] = (), yes: bool = False
) -> int:
    """Read and check every byte of the store, print the result, and return 0, or 1 for damage; blocks.

    It is the newest generation that is read, not what one that is kept beside it has alone. ``external`` are the user's
    own files that some of it lies in. Of the damaged keys those in ``drop`` are dropped, in one commit. Raises
    UsageError, with nothing dropped, when one of them does not exist or is not damaged, or is of a model and that is
    not agreed to; and where there is no store.
    """
    missing = [path for path in directories if not path.is_dir()]
    if missing or not holds_any_file(directories):
        raise UsageError(f"no run in {', '.join(map(str, missing or directories))}")
    try:
        with tiered.Store(*directories, dram=64 * MiB, mode="r", external=external) as store:
            report = store.verify()
            generation = store.generation
            unknown = [key for key in drop if key not in store]
    except CorruptionError as error:
        say(f"damaged: {error}", indent=9)
        return 1
    for damage in report.errors:
        say(f"damaged: {damage}", indent=9)
    say(
        f"read {format_bytes(report.nbytes)} in {report.num_blocks} blocks of {report.num_keys} keys, "
        f"generation {generation}: {len(report.errors) or 'none'} damaged"
    )
    if unknown:
        raise UsageError(f"--drop {unknown[0]!r}: the run has no such key; nothing was dropped")
    left = [error.key for error in report.errors if error.key not in drop]
    if drop:
        _confirm_end([key for key in drop if key.startswith(_OF_A_MODEL)], yes=yes)
        with tiered.Store(*directories, dram=64 * MiB, external=external) as store:
            for dropped in store.drop_damaged(drop):
                say(str(dropped), indent=2)
            say(f"generation {store.generation} is without them; still damaged: {_listed(left) or 'nothing'}", indent=2)
    elif left:
        say("--drop KEY drops a damaged key for good; the rest of the store is as it was", indent=2)
    return 1 if left else 0


def _confirm_end(keys: Sequence[str], *, yes: bool) -> None:
    """Raise UsageError unless ``keys``, those of a model, may be dropped: the run that they are of ends with them."""
    if keys:
        confirm(
            f"the training run cannot go on without {_listed(keys)}: drop it all the same?",
            unasked=f"--drop of {_listed(keys)} ends the training run for good and there is no terminal to ask on: "
            "add --yes",
            declined="nothing was dropped",
            yes=yes,
        )


def printable(name: str) -> str:
    """Return a key as a terminal may have it: it may be anybody's, and hold any character."""
    shown = name if name.isprintable() and name else ascii(name)
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 3]}..."


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, dict.fromkeys(keys)))


def remove_store(directories: Sequence[Path]) -> None:
    """Remove the files of the store in ``directories`` for good; blocks.

    The writer's lock is held meanwhile. Data goes before the catalog and the identities last: the remains after a crash
    are still known as a store, and can be removed again. Raises UsageError for anything but exactly one store.
    """
    locked = Directories.open(directories, "a")
    try:
        for prefix in ("data-", LEDGER_NAME, CATALOG_NAME, "identity"):
            for path in reversed(locked.paths):
                for entry in owned_files(path):
                    if entry.name.startswith(prefix):
                        entry.unlink()
                fsync_directory(path)
        for path in locked.paths:  # order: until here nobody else begins a store there
            (path / LOCK_NAME).unlink()
    finally:
        locked.close()


def load_newest(directories: Sequence[Path]) -> tuple[Root, list[Row], tuple[GenerationName, ...]]:
    """Return the newest generation of the store in ``directories``, and the names of those that are kept.

    Raises UsageError for anything but exactly one store.
    """
    homes = [path / CATALOG_NAME for path in directories if (path / CATALOG_NAME).exists()]
    if len(homes) != 1:
        where = ", ".join(map(str, directories))
        found = "none" if not homes else f"{len(homes)} of them"
        raise UsageError(f"no run in {where}: expected one {CATALOG_NAME} there, found {found}")
    catalog = SqliteCatalog(homes[0], read_only=True)
    try:
        root, rows, kept = catalog.load_newest()
        return root, list(rows), kept
    finally:
        catalog.close()
