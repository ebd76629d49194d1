"""The small files of one directory that say how fast its drive, and copies to a compute device, were measured to be.

``tiered bench`` writes them. The opening of a device and ``tiered doctor`` read the drive's profile; the bound of a
training step has both. Measuring, and choosing an engine, happen elsewhere; profile_file.py finds, reads and writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tiered.bytes.device.direct import MIN_ALIGNMENT
from tiered.bytes.device.profile_file import LONGEST_TEXT, find_profile_file, write_profile_file
from tiered.units import GiB

__all__ = [
    "ENGINES",
    "LINK_PROFILE_NAME",
    "PROFILE_NAME",
    "LinkProfile",
    "Profile",
    "find_link_profile",
    "find_profile",
    "load_link_profile",
    "load_profile",
    "write_link_profile",
    "write_profile",
]

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
    duplex: float | None  # 0: reads and writes share the drive, 1: neither slows the other; None: not measured
    measured_at: str  # ISO 8601, such as 2026-11-21T03:50:00+00:00
    kernel: str

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {self.engine!r}")
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            _check_number(name, getattr(self, name), _SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S)
        if self.duplex is not None:
            _check_number("duplex", self.duplex, 0, 1)
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
    duplex: float  # 0: both directions share the link, 1: neither slows the other
    measured_at: str  # ISO 8601
    kernel: str

    def __post_init__(self) -> None:
        _check_text("device", self.device)
        for name in ("in_bytes_per_s", "out_bytes_per_s"):
            _check_number(name, getattr(self, name), _SLOWEST_BYTES_PER_S, _FASTEST_COPY_BYTES_PER_S)
        _check_number("duplex", self.duplex, 0, 1)
        _check_origin(self)


def load_profile(directory: str | os.PathLike[str]) -> Profile | None:
    """Return the profile that ``find_profile`` finds; log its complaints, once in this process."""
    profile, complaints = find_profile(directory)
    _say(complaints)
    return profile


def load_link_profile(directory: str | os.PathLike[str]) -> LinkProfile | None:
    """Return the profile that ``find_link_profile`` finds; log its complaints, once in this process."""
    profile, complaints = find_link_profile(directory)
    _say(complaints)
    return profile


def find_profile(directory: str | os.PathLike[str]) -> tuple[Profile | None, list[str]]:
    """Return the profile of ``directory``, or of the nearest one above it on the same file system, and complaints.

    A directory that does not exist yet counts as its parent. A file is passed over with a complaint unless it is a
    sound profile that only we or root may write to. Never raises for the contents of the disk; blocks.
    """
    return find_profile_file(directory, PROFILE_NAME, lambda values: _parsed(Profile, values))


def find_link_profile(directory: str | os.PathLike[str]) -> tuple[LinkProfile | None, list[str]]:
    """Return the profile of the compute device that was measured beside ``directory``; as ``find_profile``."""
    options = " --device auto"
    return find_profile_file(directory, LINK_PROFILE_NAME, lambda values: _parsed(LinkProfile, values), options=options)


def write_profile(directory: str | os.PathLike[str], profile: Profile) -> Path:
    """Put ``profile`` into ``directory``, in place of an earlier one, and return its path; durable when it returns.

    The file is 0600 under any umask. At any instant either the old or the new profile is there. Raises TieredError.
    """
    return write_profile_file(directory, PROFILE_NAME, asdict(profile))


def write_link_profile(directory: str | os.PathLike[str], profile: LinkProfile) -> Path:
    """Put ``profile`` into ``directory`` as ``write_profile`` does."""
    return write_profile_file(directory, LINK_PROFILE_NAME, asdict(profile))


def _say(complaints: Iterable[str]) -> None:
    for complaint in complaints:
        if complaint not in _said:
            _said.add(complaint)
            _log.warning("%s", complaint)


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
