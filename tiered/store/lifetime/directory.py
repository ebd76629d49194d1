"""The directories of a store: which ones they are, which process has them open, and which are refused.

Each holds ``lock``, ``identity``, ``ledger`` and the device's ``data-NNN``; the first also ``catalog.db``. Creation
writes the identities in the order of their indexes, each durable before the next, and the caller then creates the
catalog: so where an identity is, the first one is, and where ``catalog.db`` is, creation has finished. Ledgers and data
files come only after it. An identity is one line of JSON: format, store, index, number, and a digest, which is xxh3-64
of the other fields as JSON with sorted keys. Format 2, of a rank of several, also has run, rank, world, and the runs
that it was carried over from; it lies in a directory ``rank-0003-of-0008``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from tiered.bytes.device.profile import LINK_PROFILE_NAME, PROFILE_NAME
from tiered.bytes.private_file import create_private_file, fsync_directory, refuse_trap
from tiered.errors import CapacityError, CorruptionError, DeviceError, UsageError
from tiered.store.catalog.catalog import Alone, Confirmation, Member
from tiered.store.lifetime.ledger import LEDGER_NAME
from tiered.store.lifetime.lock import LOCK_NAME, Lock

__all__ = [
    "CATALOG_NAME",
    "Directories",
    "Identity",
    "identities_in",
    "member_in",
    "owned_files",
    "rank_directories",
    "remove_files",
    "scratch_directories",
    "stores_of_ranks",
]


_FORMAT = 2  # the newest; a store that nobody shares has format 1
_MAX_NBYTES = 4096
_MAX_NUM_DIRECTORIES = 1 << 16  # the catalog's extents tell no more apart
_ALONE = Alone()


@dataclass(frozen=True, slots=True)
class Identity:
    """Directory ``index`` of the ``number`` that store ``store_uuid`` (16 bytes) has; ``member``: of several ranks'."""

    store_uuid: bytes
    index: int
    number: int
    member: Member | None = None

    def encode(self) -> bytes:
        """Return the file's content."""
        fields = {"format": 1, "index": self.index, "number": self.number, "store": self.store_uuid.hex()}
        if self.member is not None:
            fields |= {"format": 2, **self.member._asdict()}
            fields |= {"run": self.member.run.hex(), "origins": [each.hex() for each in self.member.origins]}
        return json.dumps({**fields, "digest": _digest(fields)}).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Identity:
        """Read ``path``; CorruptionError where the contents are damaged, UsageError for a newer format."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, _MAX_NBYTES)
        finally:
            os.close(fd)
        try:
            fields = json.loads(text)
            if fields.pop("digest") != _digest(fields) or not text.endswith(b"}\n"):
                raise ValueError("it does not match its digest")
            if fields["format"] > _FORMAT:
                raise UsageError(
                    f"{path} has format version {fields['format']}; this tiered reads versions 1 to {_FORMAT}: "
                    "open it with the version of tiered that wrote it"
                )
            member = None
            if fields["format"] == _FORMAT:
                origins = tuple(map(bytes.fromhex, fields["origins"]))
                member = Member(bytes.fromhex(fields["run"]), fields["rank"], fields["world"], origins)
            identity = cls(bytes.fromhex(fields["store"]), fields["index"], fields["number"], member)
            numbers = fields["format"], identity.index, identity.number, *(member or ())[1:3]
            if any(type(number) is not int for number in numbers) or fields["format"] not in (1, _FORMAT):
                raise ValueError(f"it says {fields}")
            if len(identity.store_uuid) != 16 or not 0 <= identity.index < identity.number <= _MAX_NUM_DIRECTORIES:
                raise ValueError(f"it says {identity}")
            lengths = {16} if member is None else set(map(len, (member.run, *member.origins)))
            if lengths != {16} or (member is not None and not 0 <= member.rank < member.world):
                raise ValueError(f"it says {identity}")
            return identity
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptionError(
                f"{path} is damaged ({error}): restore it from a copy of this directory", file=str(path)
            ) from error


def _digest(fields: dict[str, object]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


# -- directory ---------------------------------------------------------------------------------------------------------


CATALOG_NAME = "catalog.db"

_IDENTITY = "identity"
_NAMES = {LOCK_NAME, _IDENTITY, LEDGER_NAME, CATALOG_NAME, f"{CATALOG_NAME}-journal"}
_DATA = re.compile(r"data-\d{3,}")
_RANK = re.compile(r"rank-\d{4,}-of-(\d{4,})")
# Files that an interrupted creation, or mkfs, may leave in a directory that holds no store.
_LEFTOVERS = {LOCK_NAME, f"{_IDENTITY}.new", f"{CATALOG_NAME}.new", f"{CATALOG_NAME}.new-journal", "lost+found"}
_PROFILES = (f"{PROFILE_NAME}.", f"{LINK_PROFILE_NAME}.")
_SCRATCH = re.compile(r"scratch-[0-9a-f]{16}")  # it has a name for an instant, where files cannot be made without one
_OWNED = re.compile(
    rf"{_IDENTITY}|{LEDGER_NAME}|{_DATA.pattern}|{re.escape(CATALOG_NAME)}(-journal|\.new|\.new-journal)?"
)

Mode = Literal["a", "x", "r", "w"]


class Directories:
    """The locked directories of one store, in the order of their indexes.

    A writer's lock excludes everybody, a reader's excludes writers; both end with ``close``, with the process, and
    never by a forked child. ``created`` says that the identities are new and the caller must create the catalog in
    ``paths[0]`` before anything else. ``member``: of several ranks', with its run; None for a store of one.
    """

    def __init__(
        self, paths: tuple[Path, ...], store_uuid: bytes, locks: list[Lock], *, created: bool, member: Member | None
    ) -> None:
        self.paths = paths
        self.store_uuid = store_uuid
        self.created = created
        self.member = member
        self._locks = locks

    @classmethod
    def open(
        cls, paths: Sequence[str | os.PathLike[str]], mode: Mode = "a", confirmation: Confirmation = _ALONE
    ) -> Directories:
        """Lock ``paths``, in any order: exactly the directories of one store, or of one that is to be created.

        ``mode`` "a" opens or creates, "x" creates, "r" opens to read; a creation that was cut short is done again.
        "w" opens a store to clean it, such a creation included: ``store_uuid`` is empty then.
        ``confirmation``: of the ranks that share the store; a new one is created as theirs, once they have joined.
        "r" and "w" open one rank's alone, too.
        Raises UsageError for anything else (missing, foreign or additional directories, loose permissions, symbolic
        links inside, a second opener: the message names its pid), DeviceError for one that cannot be written to, and
        CorruptionError for a damaged identity; nothing in the directories has then been changed.
        """
        with _as_device_error():
            found = _distinct(paths)
            for path in found if mode in ("r", "w") else ():
                if not path.is_dir():
                    raise UsageError(f'{path} is no directory; mode "{mode}" opens a store that exists')
        locks: list[Lock] = []
        with _as_device_error():
            try:
                expected = confirmation.member
                plan = _survey(found, mode, expected)  # refuses before anything is created
                if plan is None and mode != "w":
                    for path in found:
                        _make_private(path)
                for path in found:
                    locks.append(Lock(path, shared=mode == "r"))
                if mode != "r":
                    _refuse_unwritable(found)
                plan = _survey(found, mode, expected)  # may have changed before the locks were ours
                if plan is None and mode == "w":
                    return cls(found, b"", locks, created=False, member=None)
                if plan is None:
                    member = expected and expected._replace(run=confirmation.join(b"", 0))
                ordered, identity = plan or (found, _write_identities(found, member))
                for lock in locks:
                    lock.hold(_IDENTITY)
                return cls(ordered, identity.store_uuid, locks, created=plan is None, member=identity.member)
            except BaseException:
                for lock in locks:
                    lock.release()
                raise

    def check_locks(self) -> None:
        """Raise DeviceError where a file that is locked has lost its name, and another process may write here."""
        with _as_device_error():
            for lock in self._locks:
                lock.check()

    def close(self) -> None:
        """Release the locks; in a forked child only its copies of their descriptors. Idempotent."""
        while self._locks:
            self._locks.pop().release()

    def __repr__(self) -> str:
        state = "open" if self._locks else "closed"
        return f"<Directories {[str(path) for path in self.paths]} of store {self.store_uuid.hex()}, {state}>"


def scratch_directories(paths: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return ``paths`` as directories for unnamed files, made where they are missing; nothing is left in them.

    Raises UsageError for a directory that holds a store.
    """
    with _as_device_error():
        found = _distinct(paths)
        for path in found:
            for name in (_IDENTITY, CATALOG_NAME):
                if os.path.lexists(path / name):
                    raise UsageError(f"{path} holds a store: a store with durable=False needs a directory without one")
        for path in found:
            if not path.exists():
                _make_private(path)
            elif not path.is_dir():
                raise UsageError(f"{path} is not a directory")
        _refuse_unwritable(found)
    return found


def _distinct(paths: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return the real paths; a link to a directory is followed, a dangling one is refused."""
    found = []
    for given in paths:
        path = Path(os.path.realpath(os.path.expanduser(given)))
        if os.path.lexists(os.path.expanduser(given)) and not path.exists():
            raise UsageError(f"{given} is a symbolic link to {path}, which does not exist")
        found.append(path)
    if len(set(found)) != len(found):
        raise UsageError(f"the same directory is given twice: {', '.join(map(str, found))}")
    return tuple(found)


def _refuse_unwritable(paths: tuple[Path, ...]) -> None:
    """Raise DeviceError where no file can be made, which a store may come to need only later."""
    for path in paths:
        if not os.access(path, os.W_OK | os.X_OK):
            raise DeviceError(f'{path} cannot be written to: chmod 700 it, or read what it holds with mode="r"')


def rank_directories(paths: Sequence[str | os.PathLike[str]], member: Member) -> tuple[Path, ...]:
    """Return the directories of ``member`` in ``paths``, which need not exist."""
    return tuple(path / f"rank-{member.rank:04d}-of-{member.world:04d}" for path in _distinct(paths))


def stores_of_ranks(path: Path) -> dict[Path, int]:
    """Return the directories in ``path`` with a finished store of a rank, and how many ranks there are, by name."""
    names = sorted(os.listdir(path)) if path.is_dir() else []
    matches = [match for name in names if (match := _RANK.fullmatch(name))]
    found = {path / match[0]: int(match[1]) for match in matches}
    return {each: world for each, world in found.items() if os.path.lexists(each / CATALOG_NAME)}


def identities_in(path: Path) -> dict[Path, Identity]:
    """Return the identities of a store in ``path``, and of the stores of ranks in it. Raises as ``Identity.read``.

    Those that cannot be read, or are no files, are left out: opening refuses them.
    """
    found: dict[Path, Identity] = {}
    with contextlib.suppress(OSError):
        names = [name for name in (os.listdir(path) if path.is_dir() else ()) if _RANK.fullmatch(name)]
        for each in (path, *(path / name for name in sorted(names))):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(each / _IDENTITY).st_mode):
                    found[each] = Identity.read(each / _IDENTITY)
    return found


def remove_files(paths: Sequence[Path]) -> None:
    """Remove the files of stores in ``paths``, whose locks the caller holds: the remains are known as a store's."""
    for prefix in ("data-", LEDGER_NAME, CATALOG_NAME, _IDENTITY):
        for path in reversed(paths):
            for entry in owned_files(path):
                if entry.name.startswith(prefix):
                    entry.unlink()
            fsync_directory(path)


def member_in(paths: Sequence[Path]) -> Member | None:
    """Return which of several ranks the store in ``paths`` is of. Raises as ``Identity.read``; changes nothing."""
    found = [Identity.read(path / _IDENTITY) for path in paths if os.path.lexists(path / _IDENTITY)]
    return found[0].member if found else None


def _survey(paths: tuple[Path, ...], mode: Mode, member: Member | None) -> tuple[tuple[Path, ...], Identity] | None:
    """Return the directories in order and the identity of the first; None where a store is to be created."""
    identities: dict[Path, Identity] = {}
    for path in paths:
        identity = _look_into(path)
        if identity is not None:
            identities[path] = identity
    if not identities or _is_unfinished(identities):
        if mode == "r" or (mode == "w" and not identities):
            raise UsageError(f'{", ".join(map(str, paths))}: no store is here; mode "{mode}" opens one that exists')
        for inner, outer in itertools.permutations(paths, 2):
            if inner.is_relative_to(outer):
                raise UsageError(f"{inner} lies in {outer}, another directory of the store: give one beside it")
        return None
    _check_set(paths, identities)
    if mode == "x":
        raise UsageError(f'{paths[0]} holds a store already; mode "x" creates one: open it with mode "a"')
    ordered = sorted(paths, key=lambda path: identities[path].index)
    found = identities[ordered[0]].member
    is_alone = member is None and mode in ("r", "w")  # to look at it, or to clean it
    if not is_alone and found is not member and not (member and member.is_same_rank(found)):
        raise UsageError(
            f"{ordered[0]} is the store of {found or 'one rank alone'}, and this is {member or 'one rank alone'};"
            f" expected all ranks together, as in torchrun --nproc-per-node {found.world if found else 1}, with the"
            ' directory that theirs lie in; one rank alone may read its store with mode="r"'
        )
    return tuple(ordered), identities[ordered[0]]


def owned_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a store, whole or in the making, in ``directory``, by name; the lock is not one of them."""
    if directory.is_dir():
        yield from (entry for entry in sorted(directory.iterdir()) if _OWNED.fullmatch(entry.name))


def _look_into(path: Path) -> Identity | None:
    """Return the identity in ``path``; None where it is missing or as good as empty. Refuses traps."""
    try:
        status = os.lstat(path)
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UsageError(f"{path} is not a directory") from error
    if os.geteuid() not in (0, status.st_uid):
        raise UsageError(f"{path} belongs to user {status.st_uid}: use a directory of your own")
    ours = {name: os.lstat(path / name) for name in names if name in _NAMES or _DATA.fullmatch(name)}
    loose = [name for name, each in ours.items() if stat.S_ISREG(each.st_mode) and each.st_mode & 0o077]
    for name in ours.keys() - (loose if _IDENTITY in names else ()):
        refuse_trap(path / name, ours[name])
    if _IDENTITY in names:
        if loose or status.st_mode & 0o077:
            first, others = path / loose[0] if loose else path, "".join(f", and so can {name}" for name in loose[1:])
            raise UsageError(
                f"{first} can be reached by others{others}; a store is for its owner alone, and a copy by cp -r, "
                "rsync or from a bucket is not: look whether the files are your own, then "
                f"chmod -R u=rwX,go= {shlex.quote(str(path))}"
            )
        return Identity.read(path / _IDENTITY)
    # A profile, measured before there was a store, is no obstacle, and it is not the store's to remove. Neither is
    # scratch space of a process that is gone, which stays where the files of an interrupted switch were removed.
    foreign = [name for name in names if name not in _LEFTOVERS and not f"{name}.".startswith(_PROFILES)]
    foreign = [name for name in foreign if not _SCRATCH.fullmatch(name)]
    if found := [*stores_of_ranks(path)]:
        raise UsageError(f"{path} holds {len(found)} stores of ranks; give the directory of one, such as {found[0]}")
    if foreign:
        raise UsageError(
            f"{path} holds {foreign[0]!r} and no store: give an empty directory, or one that does not exist yet"
        )
    return None


def _is_unfinished(identities: dict[Path, Identity]) -> bool:
    """Whether all identities are of creations that never came to a catalog.

    Nothing was ever committed there. Data files without a catalog are something else: they are never thrown away.
    """
    first = {identity.store_uuid: path for path, identity in identities.items() if identity.index == 0}
    for identity in identities.values():
        home = first.get(identity.store_uuid)
        if home is None or os.path.lexists(home / CATALOG_NAME):
            return False
    for path in identities:
        if any(_DATA.fullmatch(name) for name in os.listdir(path)):
            raise CorruptionError(
                f"{path} has data files, but {first[identities[path].store_uuid]} has no {CATALOG_NAME}: the catalog "
                "was lost; restore it from a copy, or remove the directories",
                file=str(first[identities[path].store_uuid] / CATALOG_NAME),
            )
    return True


def _check_set(paths: tuple[Path, ...], identities: dict[Path, Identity]) -> None:
    """Raise UsageError unless ``paths`` are exactly the directories of one finished store."""
    head = next((i for p, i in identities.items() if i.index == 0 and os.path.lexists(p / CATALOG_NAME)), None)
    head = head or next(iter(identities.values()))
    name = uuid.UUID(bytes=head.store_uuid)
    for path in paths:
        identity = identities.get(path)
        if identity is None:
            raise UsageError(
                f"{path} is empty, the other directories hold store {name}: it has {head.number} of them for good;"
                " leave this one out, or copy the tensors, or state_dict() of model and optimizer, to a new store over"
                " all"
            )
        if identity.store_uuid != head.store_uuid:
            other = uuid.UUID(bytes=identity.store_uuid)
            raise UsageError(
                f"{path} is directory {identity.index + 1} of {identity.number} of store {other}, not of store {name}: "
                "leave it out"
            )
    indexes = sorted(identity.index for identity in identities.values())
    if len(indexes) != head.number or indexes != list(range(len(indexes))):
        lacking = [str(i + 1) for i in range(min(head.number, len(indexes) + 8)) if i not in indexes]
        missing = ", ".join(lacking) or "none, one is there twice: leave the copy out"
        raise UsageError(
            f"store {name} has {head.number} directories, got {len(paths)} with the numbers "
            f"{', '.join(str(i + 1) for i in indexes)}; missing: {missing}"
        )


def _write_identities(paths: tuple[Path, ...], member: Member | None) -> Identity:
    """Give every directory a new identity, durably; remove the files of an interrupted creation first."""
    # The first directory's identity goes last and comes first: one without it would look like a part of another store.
    for path in sorted(paths, key=_is_first):
        for name in (*sorted(_LEFTOVERS - {LOCK_NAME, "lost+found"}), LEDGER_NAME, _IDENTITY):
            (path / name).unlink(missing_ok=True)
        fsync_directory(path)
    store_uuid = uuid.uuid4().bytes
    for index, path in enumerate(paths):
        fd = create_private_file(path / f"{_IDENTITY}.new")
        try:
            os.write(fd, Identity(store_uuid, index, len(paths), member).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(path / f"{_IDENTITY}.new", path / _IDENTITY)
        fsync_directory(path)
    return Identity(store_uuid, 0, len(paths), member)


def _is_first(path: Path) -> bool:
    identity = _look_into(path)
    return identity is not None and identity.index == 0


def _make_private(path: Path) -> None:
    """Make the directory, and missing ones above it, for its owner alone; durable."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        os.chmod(directory, 0o700)  # against the umask
        fsync_directory(directory.parent)
    os.chmod(path, 0o700)


@contextmanager
def _as_device_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"the store could not be opened: {error}; free some space there") from error
        hint = '; mode="r" reads a store there' if error.errno == errno.EROFS else ""
        raise DeviceError(f"the directories of the store could not be opened: {error}{hint}") from error
