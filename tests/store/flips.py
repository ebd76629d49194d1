"""One flipped bit in one file of a store's directories, and what the store then does: it finds out, or nothing changed.

The store lies in two directories, closed in order, killed inside a commit, or left with a generation that was not
confirmed beside the one before; each case starts from the same bytes.
"""

from __future__ import annotations

import datetime
import random
import sqlite3
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests.store.rig import WAIT_S, Counter, numbers
from tests.store.together import Together
from tiered.bytes.arena import Arena
from tiered.bytes.device.profile import PROFILE_NAME, Profile, write_profile
from tiered.errors import CorruptionError
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.row import Extent, Row, part_of
from tiered.store.lifetime.directory import CATALOG_NAME
from tiered.store.lifetime.ledger import LEDGER_NAME
from tiered.store.lifetime.opening import open_parts
from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__ = ["CLASSES", "Flip", "Subject", "batch", "draw", "try_flip"]

JOURNAL_NAME = f"{CATALOG_NAME}-journal"
CLASSES = {
    "data in use": 3, "data not in use": 1, "catalog": 3, "catalog of a killed commit": 2,
    "catalog of two generations": 2, "journal": 3, "identity": 2, "lock": 1, "profile": 1, "ledger": 1,
}  # fmt: skip
"""The classes of bytes, and how often each is drawn: the small ones as often as the large, those that matter more."""

_DATA_NBYTES = 256 * KiB  # of each directory's file: enough for one more commit without growing it
_PAGE_NBYTES = 4096
_BATCH = 200
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # https://sqlite.org/fileformat.html, section 3

Killed = Literal["", "early", "torn", "late", "unconfirmed"]
"""How much of a commit had reached the catalog when its process was killed: no commit, no page, some pages, all; or all
but the confirmation of those that share the store."""

Image = dict[Path, bytes]


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of ``file`` in a store that was closed in order or ``killed``.

    ``is_long``: it is looked at by a reader too. ``chosen``: the generation that all have who share the store.
    """

    kind: str
    killed: Killed
    file: Path
    offset: int
    bit: int
    is_long: bool = False
    chosen: int | None = None


class Subject:
    """A store of three generations in ``root``, as the bytes of its files, and what it holds.

    ``images`` has the files by how the store was left. "late", whose journal alone says that generation 4 is not
    committed, is 3 with the journal and, whole as well, 4 without. "unconfirmed" is 3 or 4, as those say that share the
    store. All others can only be generation 3.
    """

    def __init__(self, root: Path) -> None:
        self.directories = [root / "a", root / "b"]
        self.images: dict[Killed, Image] = {}
        self.contents: dict[int, dict[str, torch.Tensor]] = {}
        self.states: dict[int, dict[str, Any]] = {}
        self.used: list[tuple[Path, int, int]] = []  # ranges of the data files that hold committed bytes
        with self.open() as store:
            store.register("counter", Counter(3))
            for generation in (1, 2, 3):
                self._put(store, generation)
                store.commit({"step": generation, "more": "s" * 5000})
                self._note(store, generation)
            rows = [store.working_set.entries[name].row for name in store]
            places = [(e.device, e.offset, e.nbytes) for row in rows if row is not None for e in _extents(row)]
            self.used = [(self.directories[d] / "data-000", offset, nbytes) for d, offset, nbytes in places]
        for directory in self.directories:
            write_profile(directory, _profile())
            with open(directory / "data-000", "r+b") as data:
                data.truncate(_DATA_NBYTES)
        self.images[""] = self._files()
        old, (new, journal) = self.images[""][self._home(CATALOG_NAME)], self._killed_commit()
        for killed, catalog in (("early", old), ("torn", _mixed(old, new)), ("late", new)):
            image = {**self.images["early" if killed != "early" else ""], **self._files(data_only=True)}
            self.images[killed] = {**image, self._home(CATALOG_NAME): catalog, self._home(JOURNAL_NAME): journal}
        self.restore(self.images[""])
        self._commit_4(self.open(chosen=3))
        self.images["unconfirmed"] = self._files()

    def open(self, mode: str = "a", chosen: int | None = None) -> Store:
        """Open the store, as one that others share with ``chosen``."""
        if chosen is None:
            return Store(*self.directories, dram="8MiB", mode=mode)
        parts = open_parts(self.directories, Arena(8 * MiB), durable=True, engine="auto", mode=mode)
        parts.confirmation = Together(chosen)
        store = Store._from_parts(parts, mode=mode, deadline_s=WAIT_S)
        return store

    def restore(self, image: Image) -> None:
        """Make the directories hold ``image`` and nothing else."""
        for directory in self.directories:
            for path in directory.iterdir():
                if path not in image:
                    path.unlink()
        for path, content in image.items():
            path.write_bytes(content)
            path.chmod(0o600)  # what was played back is new

    def _put(self, store: Store, generation: int) -> None:
        """Change some of everything: inline, odd and paged tensors, many rows, a row longer than a page, deletions."""
        sizes = {"inline": 100, "odd": 5001, "paged": 12 * KiB, "large": 40_000, "x" * 10_000: 9000, "": 0}
        store.put_many({name: numbers(nbytes, generation) for name, nbytes in sizes.items()})
        store["matrix"] = torch.full((30, 50), float(generation), dtype=torch.bfloat16)
        store.put_many({f"row {i} {'n' * 900}": numbers(i, generation) for i in range(0, 18, generation)})
        if generation == 1:
            store.put("parts", numbers(30_000, 1), block_size="4KiB")
        else:
            store.write_part("parts", 4000 * generation, numbers(9000, generation))
        store[f"gone {generation}"] = numbers(9000)
        if generation > 1:
            del store[f"gone {generation - 1}"]
        else:
            store["kept"] = numbers(6000)

    def _note(self, store: Store, generation: int) -> None:
        self.contents[generation] = {name: store[name] for name in store}
        self.states[generation] = store.state

    def _files(self, *, data_only: bool = False) -> Image:
        paths = [path for directory in self.directories for path in sorted(directory.iterdir())]
        return {path: path.read_bytes() for path in paths if not data_only or path.name.startswith("data-")}

    def _home(self, name: str) -> Path:
        return self.directories[0] / name

    def _killed_commit(self) -> tuple[bytes, bytes]:
        """Commit generation 4; return the catalog after it, and the journal as it stood before the first page of it."""
        store = self.open()
        catalog = store._parts.catalog
        assert isinstance(catalog, SqliteCatalog) and catalog._connection is not None
        held = _HeldCommit(catalog._connection, self._home(JOURNAL_NAME))
        catalog._connection = held  # type: ignore[assignment]
        self._commit_4(store)
        return self._home(CATALOG_NAME).read_bytes(), held.journal

    def _commit_4(self, store: Store) -> None:
        with store:
            store.register("counter", Counter(4))
            self._put(store, 4)
            store.commit({"step": 4, "more": "t" * 5000})
            self._note(store, 4)


class _HeldCommit:
    """A connection that keeps the journal of its commits: whole, as it is before a page of the database changes."""

    def __init__(self, connection: sqlite3.Connection, journal: Path) -> None:
        self._connection = connection
        self._path = journal
        self.journal = b""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            self._keep()
        return self._connection.execute(sql, *parameters)

    def _keep(self) -> None:
        """Let a reader hold the commit up: by then all pages are in the journal; magic and number are next."""
        with closing(sqlite3.connect(self._path.with_name(CATALOG_NAME), isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM root").fetchone()
            self._connection.execute("PRAGMA busy_timeout=0")
            try:
                self._connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                assert error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            journal = bytearray(self._path.read_bytes())
            reader.execute("ROLLBACK")
        header_nbytes = int.from_bytes(journal[20:24], "big")
        num_records = (len(journal) - header_nbytes) // (_PAGE_NBYTES + 8)
        assert num_records > 3 and header_nbytes + num_records * (_PAGE_NBYTES + 8) == len(journal)
        journal[:12] = _JOURNAL_MAGIC + num_records.to_bytes(4, "big")
        self.journal = bytes(journal)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def draw(subject: Subject, rng: random.Random) -> Flip:
    """Draw a class of bytes, then one of its bits; of catalog and journal half of them where the structure is."""
    kind = rng.choices(list(CLASSES), list(CLASSES.values()))[0]
    killed: Killed = rng.choice(("early", "torn", "late")) if kind in ("catalog of a killed commit", "journal") else ""
    killed = "unconfirmed" if kind == "catalog of two generations" else killed
    chosen = rng.choice((3, 4)) if killed == "unconfirmed" else None
    image = subject.images[killed]
    directory = rng.choice(subject.directories)
    if kind == "data in use":
        file, start, nbytes = rng.choice(subject.used)
        offset = start + rng.randrange(nbytes)
    else:
        names = {"journal": JOURNAL_NAME, "identity": "identity", "lock": "lock", "profile": PROFILE_NAME}
        names["ledger"] = LEDGER_NAME
        home = subject.directories[0]
        file = home / CATALOG_NAME if kind.startswith("catalog") else directory / names.get(kind, "data-000")
        file = home / JOURNAL_NAME if kind == "journal" else file
        offset = rng.randrange(len(image[file]))
        if kind == "data not in use":
            while any(path == file and start <= offset < start + nbytes for path, start, nbytes in subject.used):
                offset = rng.randrange(len(image[file]))
        elif file.parent == home and file.name in (CATALOG_NAME, JOURNAL_NAME) and rng.random() < 0.5:
            offset = _structural(len(image[file]), file.name, rng)
    return Flip(kind, killed, file, offset, rng.randrange(8), is_long=rng.random() < 0.2, chosen=chosen)


def _structural(nbytes: int, name: str, rng: random.Random) -> int:
    """Return an offset in a page's header or, in a journal, in its header or beside a page."""
    if name == CATALOG_NAME:
        return rng.randrange(nbytes // _PAGE_NBYTES) * _PAGE_NBYTES + rng.randrange(100)
    if rng.random() < 0.5:
        return rng.randrange(28)
    record_nbytes = _PAGE_NBYTES + 8
    first = nbytes % record_nbytes
    return first + rng.randrange((nbytes - first) // record_nbytes) * record_nbytes + rng.choice([0, 1, 2, 3, -4, -1])


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Try the flips of ``seed`` on a store of its own in ``place``; return their number and what was wrong."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=place) as root:
        subject = Subject(Path(root))
        outcomes = [try_flip(subject, draw(subject, rng)) for _ in range(_BATCH)]
    return len(outcomes), [wrong for _, wrong in outcomes if wrong]


def try_flip(subject: Subject, flip: Flip) -> tuple[str, str]:
    """Flip the bit, and open, read, verify and go on; return "detected" or "harmless", and what was wrong ("")."""
    image = dict(subject.images[flip.killed])
    content = bytearray(image[flip.file])
    content[flip.offset] ^= 1 << flip.bit
    image[flip.file] = bytes(content)
    subject.restore(image)
    try:
        for mode in ("r", "a") if flip.is_long else ("a",):
            outcome, wrong = _use(subject, flip, mode)
            if wrong:
                break
    except CorruptionError as error:
        outcome, wrong = "detected", "" if _is_file(subject, error.file) else f"an error that names no file: {error!r}"
    except Exception as error:
        outcome, wrong = "broken", f"{type(error).__name__}: {error}"
    return outcome, wrong and f"{flip}: {wrong}"


def _use(subject: Subject, flip: Flip, mode: str) -> tuple[str, str]:
    with subject.open(mode, flip.chosen) as store:
        generation = store.generation
        if generation not in ((3, 4) if flip.killed == "late" else (flip.chosen or 3,)):
            return "broken", f"generation {generation}"
        damaged, wrong = _look(store, subject, generation)
        if wrong or damaged or mode == "r":
            return ("detected" if damaged else "harmless"), wrong
        store["after"] = numbers(7000, 7)
        store.commit({"step": generation + 1})
    if not flip.is_long:
        return "harmless", ""
    with subject.open("r") as store:
        subject_contents = {**subject.contents[generation], "after": numbers(7000, 7)}
        if store.generation != generation + 1 or set(store) != set(subject_contents):
            return "broken", f"after the next commit generation {store.generation}, keys {sorted(store)}"
        wrong_keys = [name for name, value in subject_contents.items() if not torch.equal(store[name], value)]
        return "harmless", f"after the next commit other bytes in {wrong_keys}" if wrong_keys else ""


def _look(store: Store, subject: Subject, generation: int) -> tuple[set[str], str]:
    """Read every key; return those that are refused, and what is wrong."""
    expected = subject.contents[generation]
    if set(store) != set(expected) or store.state != subject.states[generation]:
        return set(), f"keys {sorted(store)}, state {store.state}"
    damaged = set()
    for name, value in expected.items():
        try:
            if not torch.equal(store[name], value):
                return damaged, f"{name!r} was read with other bytes"
        except CorruptionError as error:
            if error.key != name or not _is_file(subject, error.file) or error.offset < 0:
                return damaged, f"damage without its place: {error!r}"
            damaged.add(name)
    report = store.verify()
    if {error.key for error in report.errors} != damaged:
        return damaged, f"{sorted(damaged)} could not be read, verify reports {report.errors}"
    return damaged, ""


def _is_file(subject: Subject, file: str) -> bool:
    return Path(file).parent in subject.directories and Path(file).exists()


def _mixed(old: bytes, new: bytes) -> bytes:
    """Return a catalog of which every second page that a commit changes has been written; the first one has not."""
    pages = range(0, max(len(old), len(new)), _PAGE_NBYTES)
    changed = [at for at in pages if old[at : at + _PAGE_NBYTES] != new[at : at + _PAGE_NBYTES]]
    written = set(changed[1::2])
    assert written
    size = max(len(old), max(written) + _PAGE_NBYTES)
    mixed = bytearray(old.ljust(size, b"\0"))
    for at in written:
        mixed[at : at + _PAGE_NBYTES] = new[at : at + _PAGE_NBYTES]
    return bytes(mixed)


def _extents(row: Row) -> tuple[Extent, ...]:
    return part_of(row, 0, row.num_blocks).extents if row.is_paged else row.extents


def _profile() -> Profile:
    return Profile(
        engine="uring", read_bytes_per_s=3e9, write_bytes_per_s=2e9, block_nbytes=1 << 20, read_depth=8,
        write_depth=8, duplex=None, measured_at=datetime.datetime(2026, 11, 21).isoformat(), kernel="6.1",
    )  # fmt: skip
