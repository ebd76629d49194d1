"""The directories of a store: which they are, who has them open, and what is refused.

Each holds ``lock``, ``identity`` and the device's ``data-NNN``; the first also ``catalog.db``. Creation writes the
identities in the order of their indexes, each durable before the next, and the caller then creates the catalog: so
where an identity is, the first one is, and where ``catalog.db`` is, creation has finished. Data files come only after
it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tiered.bytes.device.profile import PROFILE_NAME
from tiered.errors import CorruptionError, DeviceError, UsageError
from tiered.store.identity import Identity

__all__ = [
    "CATALOG_NAME",
    "Directories",
    "create_private_file",
    "fsync_directory",
    "owned_files",
    "scratch_directories",
]

CATALOG_NAME = "catalog.db"

_IDENTITY, _LOCK = "identity", "lock"
_NAMES = {_LOCK, _IDENTITY, CATALOG_NAME, f"{CATALOG_NAME}-journal"}
_DATA = re.compile(r"data-\d{3,}")
# What a creation that was cut short, or mkfs, may leave in a directory that holds no store.
_LEFTOVERS = {_LOCK, f"{_IDENTITY}.new", f"{CATALOG_NAME}.new", f"{CATALOG_NAME}.new-journal", "lost+found"}
_OWNED = re.compile(rf"{_IDENTITY}|{_DATA.pattern}|{re.escape(CATALOG_NAME)}(-journal|\.new|\.new-journal)?")

Mode = Literal["a", "x", "r", "w"]


class Directories:
    """The locked directories of one store, in the order of their indexes.

    A writer's lock excludes everybody, a reader's excludes writers; both end with ``close``, with the process, and
    never by a forked child. ``created`` says that the identities are new and the caller must create the catalog in
    ``paths[0]`` before anything else.
    """

    def __init__(self, paths: tuple[Path, ...], store_uuid: bytes, locks: list[int], *, created: bool) -> None:
        self.paths = paths
        self.store_uuid = store_uuid
        self.created = created
        self._locks = locks
        self._pid = os.getpid()
        _guard_against_fork(self)

    @classmethod
    def open(cls, paths: Sequence[str | os.PathLike[str]], mode: Mode = "a") -> Directories:
        """Lock ``paths``, in any order: exactly the directories of one store, or of one that is to be created.

        ``mode`` "a" opens or creates, "x" creates, "r" opens to read; a creation that was cut short is done again.
        "w" opens what is there to be cleaned, such a creation included: ``store_uuid`` is empty then.
        Raises UsageError for anything else (missing, foreign or additional directories, loose permissions, symbolic
        links inside, a second opener: the message names its pid) and CorruptionError for a damaged identity; nothing
        in the directories has then been changed.
        """
        if mode not in ("a", "x", "r", "w"):
            raise ValueError(f'mode must be "a", "x", "r" or "w", got {mode!r}')
        found = _distinct(paths)
        if mode in ("r", "w"):
            for path in found:
                if not path.is_dir():
                    raise UsageError(f'{path} is no directory; mode "{mode}" opens a store that exists')
        locks: list[int] = []
        with _as_device_error():
            try:
                plan = _survey(found, mode)  # refuses before anything is created
                if plan is None and mode != "w":
                    for path in found:
                        _make_private(path)
                for path in found:
                    locks.append(_lock(path, shared=mode == "r"))
                plan = _survey(found, mode)  # what it was may have changed before the locks were ours
                if plan is not None:
                    return cls(plan[0], plan[1], locks, created=False)
                if mode == "w":
                    return cls(found, b"", locks, created=False)
                return cls(found, _write_identities(found), locks, created=True)
            except BaseException:
                _unlock(locks)
                raise

    def close(self) -> None:
        """Release the locks; in a forked child only its copies of their descriptors. Idempotent."""
        _unlock(self._locks, release=self._pid == os.getpid())

    def __repr__(self) -> str:
        state = "open" if self._locks else "closed"
        return f"<Directories {[str(path) for path in self.paths]} of store {self.store_uuid.hex()}, {state}>"


def scratch_directories(paths: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return ``paths`` as directories for unnamed files, made where they are missing; nothing is left in them.

    Raises UsageError for a directory that holds a store.
    """
    found = _distinct(paths)
    for path in found:
        for name in (_IDENTITY, CATALOG_NAME):
            if os.path.lexists(path / name):
                raise UsageError(f"{path} holds a store: a store with durable=False needs a directory without one")
    with _as_device_error():
        for path in found:
            if not path.exists():
                _make_private(path)
            elif not path.is_dir():
                raise UsageError(f"{path} is not a directory")
    return found


def create_private_file(path: Path) -> int:
    """Create ``path`` for its owner alone, whatever the umask, and return its descriptor.

    Raises FileExistsError where anything has that name already, a dangling symbolic link included.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _distinct(paths: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return the real paths; a link to a directory is followed, a dangling one is refused."""
    if not paths:
        raise ValueError("a store needs at least one directory")
    found = []
    for given in paths:
        path = Path(os.path.realpath(os.path.expanduser(given)))
        if os.path.lexists(os.path.expanduser(given)) and not path.exists():
            raise UsageError(f"{given} is a symbolic link to {path}, which does not exist")
        found.append(path)
    if len(set(found)) != len(found):
        raise UsageError(f"the same directory is given twice: {', '.join(map(str, found))}")
    return tuple(found)


def _survey(paths: tuple[Path, ...], mode: Mode) -> tuple[tuple[Path, ...], bytes] | None:
    """Return the directories in order and the uuid of the store they are; None where one is to be created."""
    identities: dict[Path, Identity] = {}
    for path in paths:
        identity = _look_into(path)
        if identity is not None:
            identities[path] = identity
    if not identities or _is_unfinished(identities):
        if mode == "r" or (mode == "w" and not identities):
            raise UsageError(f'{", ".join(map(str, paths))}: no store is here; mode "{mode}" opens one that exists')
        return None
    _check_set(paths, identities)
    if mode == "x":
        raise UsageError(f'{paths[0]} holds a store already; mode "x" creates one: open it with mode "a"')
    ordered = sorted(paths, key=lambda path: identities[path].index)
    return tuple(ordered), identities[ordered[0]].store_uuid


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
    ours = [name for name in names if name in _NAMES or _DATA.fullmatch(name)]
    for name in ours:
        _refuse_trap(path / name, os.lstat(path / name))
    if _IDENTITY in names:
        if status.st_mode & 0o077:
            raise UsageError(
                f"{path} can be reached by others ({stat.filemode(status.st_mode)}); a store's directory is for its "
                f"owner alone: look whether its files are your own, then chmod 700 it"
            )
        return Identity.read(path / _IDENTITY)
    # The drive's profile, measured before there was a store, is no obstacle; and it is not the store's to remove.
    foreign = [name for name in names if name not in _LEFTOVERS and not f"{name}.".startswith(f"{PROFILE_NAME}.")]
    if foreign:
        raise UsageError(
            f"{path} holds {foreign[0]!r} and no store: give an empty directory, or one that does not exist yet"
        )
    return None


def _refuse_trap(path: Path, status: os.stat_result) -> None:
    is_own = os.geteuid() in (0, status.st_uid) and status.st_nlink == 1  # a second name may be another's file
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or not is_own:
        raise UsageError(
            f"{path} must be a regular file of your own with one name and permissions 0600, got "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid} with {status.st_nlink} names: look whether it is "
            "what you wrote"
        )


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
            raise UsageError(f"{path} is empty, the other directories hold store {name}: it has {head.number} of them")
        if identity.store_uuid != head.store_uuid:
            other = uuid.UUID(bytes=identity.store_uuid)
            raise UsageError(
                f"{path} is directory {identity.index + 1} of {identity.number} of store {other}, not of store {name}"
            )
    indexes = sorted(identity.index for identity in identities.values())
    if len(indexes) != head.number or indexes != list(range(len(indexes))):
        missing = [str(i + 1) for i in range(min(head.number, len(indexes) + 8)) if i not in indexes]
        raise UsageError(
            f"store {name} has {head.number} directories, got {len(paths)} with the numbers "
            f"{', '.join(str(i + 1) for i in indexes)}; missing: {', '.join(missing) or 'none, one is there twice'}"
        )


def _write_identities(paths: tuple[Path, ...]) -> bytes:
    """Give every directory a new identity, durably; what a creation that was cut short left is removed first."""
    # The first directory's identity goes last and comes first: one without it would look like a part of another store.
    for path in sorted(paths, key=_is_first):
        for name in (*sorted(_LEFTOVERS - {_LOCK, "lost+found"}), _IDENTITY):
            (path / name).unlink(missing_ok=True)
        fsync_directory(path)
    store_uuid = uuid.uuid4().bytes
    for index, path in enumerate(paths):
        fd = create_private_file(path / f"{_IDENTITY}.new")
        try:
            os.write(fd, Identity(store_uuid, index, len(paths)).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(path / f"{_IDENTITY}.new", path / _IDENTITY)
        fsync_directory(path)
    return store_uuid


def _is_first(path: Path) -> bool:
    identity = _look_into(path)
    return identity is not None and identity.index == 0


def _make_private(path: Path) -> None:
    """Make the directory, and what is missing above it, for its owner alone; durable."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        os.chmod(directory, 0o700)  # whatever the umask left of it
        fsync_directory(directory.parent)
    os.chmod(path, 0o700)


def _lock(path: Path, *, shared: bool) -> int:
    """Return a descriptor that holds the lock of ``path``; UsageError names who has it."""
    name = path / _LOCK
    try:
        fd = create_private_file(name)
    except FileExistsError:
        _refuse_trap(name, os.lstat(name))
        # Read-only will do for a reader on a file system that is.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, (os.O_RDONLY if shared else os.O_RDWR) | flags)
    try:
        _refuse_trap(name, os.fstat(fd))  # the same name may be another file by now
        _take(fd, path, shared=shared)
        if os.fstat(fd).st_ino != os.lstat(name).st_ino:
            raise UsageError(f"{name} was replaced while it was being locked: open the store again")
        if not shared:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take(fd: int, path: Path, *, shared: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{path} is open in process {_owner(fd)}: one writer or several readers at a time; close it there first"
        ) from error


def _owner(fd: int) -> str:
    """Return the pid that holds the lock: from the kernel's list, else what the last writer left in the file."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open("/proc/locks") as lines:
            held = [line.split() for line in lines]
    except OSError:
        held = []
    for words in held:
        if words[1] == "FLOCK" and place in words and words[4].isdigit() and words[4] != "0":
            return words[4]
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _unlock(locks: list[int], *, release: bool = True) -> None:
    while locks:
        fd = locks.pop()
        try:
            if release:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also what a child holds that has only just been forked
        finally:
            os.close(fd)


@contextmanager
def _as_device_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DeviceError(f"the directories of the store could not be opened: {error}") from error


_open: weakref.WeakSet[Directories] = weakref.WeakSet()
_hooks: list[bool] = []


def _guard_against_fork(directories: Directories) -> None:
    """Close the locks in every forked child: else they would outlive the parent in an orphan."""
    if not _hooks:
        _hooks.append(True)
        os.register_at_fork(after_in_child=_close_in_child)
    _open.add(directories)


def _close_in_child() -> None:
    for directories in list(_open):
        directories.close()
