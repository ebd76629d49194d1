"""The small files of one directory that say how fast its drive, and copies to a compute device, were measured to be.

``tiered bench`` writes them. The opening of a device and ``tiered doctor`` read the drive's profile; the bound of a
training step has both. Measuring, and choosing an engine, happen elsewhere. The files are found from below, read
warily and written whole. They are advice: a wrong one costs a warning and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tiered.bytes.device.direct_io import MIN_ALIGNMENT
from tiered.bytes.device.files import translating
from tiered.bytes.private_file import create_private_file, fsync_directory, opened
from tiered.units import GiB

__all__ = [
    "LINK_PROFILE_NAME",
    "LONGEST_TEXT",
    "PROFILE_NAME",
    "LinkProfile",
    "Profile",
    "find_profile",
    "load_link_profile",
    "load_profile",
    "write_profile",
]


LONGEST_TEXT = 200
"""Characters of a text in such a file, and about as many of a complaint."""

_LARGEST_NBYTES = 64 * 1024  # never read more of a file that may be anybody's


def _places(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the directory, or its nearest existing parent, and those above it up to the mount point."""
    path = Path(os.path.realpath(directory))
    device = None
    for place in (path, *path.parents):
        try:
            status = os.stat(place)
        except OSError:
            if device is None:
                continue
            return
        if device not in (None, status.st_dev):
            return
        device = status.st_dev
        yield place


def _read(path: Path) -> dict[str, object]:
    """Return the object in ``path``. Raises OSError, ValueError or RecursionError for anything else."""
    # NONBLOCK: a FIFO must not hang the open.
    with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        _check_private(os.fstat(fd))
        content = os.read(fd, _LARGEST_NBYTES + 1)
    if len(content) > _LARGEST_NBYTES:
        raise ValueError(f"it is larger than {_LARGEST_NBYTES} bytes")
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected one JSON object, got {type(values).__name__}")
    return values


def _check_private(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise ValueError("it is not a regular file with one name")
    if status.st_uid not in (0, os.geteuid()):
        raise ValueError(f"it belongs to user {status.st_uid}, neither you nor root")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write to it ({stat.filemode(status.st_mode)})")


# -- profile -----------------------------------------------------------------------------------------------------------


PROFILE_NAME = ".tiered-profile.json"
"""The name of the drive's file; a name that begins with it and goes on with "." is a write that was cut short."""

LINK_PROFILE_NAME = ".tiered-link.json"
"""The name of the file about copies between DRAM and a compute device; as above."""

ENGINES = ("uring", "threads", "aiofiles", "mmap")
"""The engines a profile may name."""

_VERSION = 1
_SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S = 1e5, 1e12  # a broken USB stick, and far beyond any drive
_FASTEST_COPY_BYTES_PER_S = 1e13  # far beyond any link
_LARGEST_BLOCK_NBYTES, _DEEPEST = GiB, 65536

_T = TypeVar("_T", "Profile", "LinkProfile")
_log = logging.getLogger("tiered")
_said: set[str] = set()  # complaints that were logged


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measurements of one directory. Raises ValueError for values that no drive and no bench can give."""

    version: int = _VERSION
    engine: str  # one of ENGINES: the best one here
    read_bytes_per_s: float  # alone, at block_nbytes and read_depth, through memory larger than the caches
    write_bytes_per_s: float  # alone, overwriting, as well
    block_nbytes: int  # the best size of one operation; a multiple of 4,096
    read_depth: int  # operations in flight
    write_depth: int
    duplex: float | None  # from -1; 0: reads and writes share the drive, 1: neither slows the other; None: not measured
    measured_at: str  # ISO 8601, such as 2026-11-21T03:50:00+00:00
    kernel: str

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {self.engine!r}")
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            _check_number(name, getattr(self, name), _SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S)
        if self.duplex is not None:
            _check_number("duplex", self.duplex, -1, 1)
        _check_count("block_nbytes", self.block_nbytes, MIN_ALIGNMENT, _LARGEST_BLOCK_NBYTES)
        if self.block_nbytes % MIN_ALIGNMENT:
            raise ValueError(f"block_nbytes must be a multiple of {MIN_ALIGNMENT}, got {self.block_nbytes}")
        for name in ("read_depth", "write_depth"):
            _check_count(name, getattr(self, name), 1, _DEEPEST)
        _check_origin(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """The rates of copies between page-locked DRAM and a compute device. ValueError for values that none can have."""

    version: int = _VERSION
    device: str  # the type of the compute device, such as "cuda"
    in_bytes_per_s: float  # to the device, alone, through memory larger than the caches
    out_bytes_per_s: float  # from it, as well
    duplex: float  # from -1; 0: both directions share the link, 1: neither slows the other
    measured_at: str  # ISO 8601
    kernel: str

    def __post_init__(self) -> None:
        _check_text("device", self.device)
        for name in ("in_bytes_per_s", "out_bytes_per_s"):
            _check_number(name, getattr(self, name), _SLOWEST_BYTES_PER_S, _FASTEST_COPY_BYTES_PER_S)
        _check_number("duplex", self.duplex, -1, 1)
        _check_origin(self)


def load_profile(directory: str | os.PathLike[str]) -> Profile | None:
    """Return the profile that ``find_profile`` finds; log its complaints, once in this process."""
    return _load(Profile, directory)


def load_link_profile(directory: str | os.PathLike[str]) -> LinkProfile | None:
    """Return the profile of the compute device that was measured beside ``directory``; as ``load_profile``."""
    return _load(LinkProfile, directory)


def find_profile(directory: str | os.PathLike[str]) -> tuple[Profile | None, list[str]]:
    """Return the profile of ``directory``, or of the nearest one above it on the same file system, and complaints.

    A directory that does not exist yet counts as its parent. A file is passed over with a complaint unless it is a
    sound profile that only we or root may write to. Never raises for the contents of the disk; blocks.
    """
    return _find(Profile, directory)


def write_profile(directory: str | os.PathLike[str], profile: Profile | LinkProfile) -> Path:
    """Put ``profile`` into ``directory``, in place of an earlier one, and return its path; durable when it returns.

    The file is 0600 under any umask. At any instant either the old or the new profile is there. Raises TieredError.
    """
    path = Path(directory) / _FILES[type(profile)][0]
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    content = f"{json.dumps(asdict(profile), indent=1)}\n".encode()
    with translating(f"cannot write {path}"):
        try:
            fd = create_private_file(temporary)
            try:
                while content:
                    content = content[os.write(fd, content) :]
                os.fsync(fd)  # order: before the rename, or a power cut could leave the name on an empty file
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)
    return path


_FILES = {Profile: (PROFILE_NAME, ""), LinkProfile: (LINK_PROFILE_NAME, " --device auto")}
"""By kind: the file's name, and the options of ``tiered bench`` that measure it again."""


def _load(kind: type[_T], directory: str | os.PathLike[str]) -> _T | None:
    profile, complaints = _find(kind, directory)
    for complaint in complaints:
        if complaint not in _said:
            _said.add(complaint)
            _log.warning("%s", complaint)
    return profile


def _find(kind: type[_T], directory: str | os.PathLike[str]) -> tuple[_T | None, list[str]]:
    (name, options), complaints = _FILES[kind], list[str]()
    for place in _places(directory):
        try:
            return _parsed(kind, _read(place / name)), complaints
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = str((isinstance(error, OSError) and error.strerror) or error or repr(error))
            complaints.append(
                f"{place / name} is ignored: {reason[: 2 * LONGEST_TEXT]}; "
                f"remove it, or measure again: tiered bench {place}{options}"
            )
    return None, complaints


def _parsed(kind: type[_T], values: dict[str, object]) -> _T:
    """Return the profile of ``values``. Raises ValueError or TypeError where they are none."""
    if values.get("version") != _VERSION:
        raise ValueError(f"expected version {_VERSION}, got {values.get('version')!r}")
    names = {field.name for field in fields(kind)}
    if values.keys() != names:
        raise ValueError(f"missing or unknown: {', '.join(sorted(map(repr, values.keys() ^ names)))}")
    return kind(**values)  # type: ignore[arg-type]  # it checks each value


def _check_origin(profile: Profile | LinkProfile) -> None:
    """Check the names that both kinds of profile have."""
    if type(profile.version) is not int or profile.version != _VERSION:
        raise ValueError(f"version must be {_VERSION}, got {profile.version!r}")
    for name in ("measured_at", "kernel"):
        _check_text(name, getattr(profile, name))
    datetime.fromisoformat(profile.measured_at)


def _check_number(name: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:  # so is NaN refused
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, got {value!r:.50}")


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r:.50}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT or not value.isprintable():
        raise ValueError(f"{name} must be a line of at most {LONGEST_TEXT} characters, got {value!r:.50}")
