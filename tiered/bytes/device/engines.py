"""The choice of an engine for a directory or for external files: the one asked for, or the best that works there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from tiered.bytes.device.aio import AiofilesDevice
from tiered.bytes.device.external_files import absolute_paths, open_regular
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.mmap import MmapDevice
from tiered.bytes.device.profile import Profile, load_profile
from tiered.bytes.device.requests import MOST_REQUESTS
from tiered.bytes.device.threads import ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.bytes.device.uring_probe import probe_uring, probe_uring_read
from tiered.errors import DeviceError, UsageError
from tiered.units import KiB, MiB, round_up

__all__ = ["DEVICES", "choose_engine", "open_device", "open_external"]

DEVICES: dict[str, type[FileDevice]] = {
    device.engine: device for device in (UringDevice, ThreadsDevice, AiofilesDevice, MmapDevice)
}
"""The engines over files by name."""

_MOST_THREADS = 64
# Requests of less cost CPU time that a store's larger blocks have not cost; of more, a demand read waits too long.
_LEAST_REQUEST_NBYTES, _MOST_REQUEST_NBYTES = 512 * KiB, 4 * MiB
_IN_FLIGHT_NBYTES = 32 * MiB  # at least, so that a busy Python thread does not leave the drive idle
_log = logging.getLogger("tiered")
_said: set[str] = set()  # reasons that were logged: once each, however many directories and stores


def choose_engine(
    directory: str | os.PathLike[str], profile: Profile | None = None, *, deadline_s: float = 60.0
) -> tuple[str, str]:
    """Return the best engine for ``directory`` and why; blocks for one trial write and read, ``deadline_s`` each.

    io_uring where its probe passes, unless ``profile`` says that another engine was faster there; else threads.
    """
    return _choose(profile, lambda: probe_uring(directory, deadline_s=deadline_s))


def open_device(
    directory: str | os.PathLike[str], engine: str = "auto", *, deadline_s: float = 60.0, direct: bool | None = None
) -> FileDevice:
    """Return the device of ``directory`` served by ``engine``; the caller closes it.

    "auto" takes the engine of ``choose_engine``, and logs it once when that is not io_uring. A named engine that does
    not work here is a DeviceError, an unknown name a UsageError. ``direct`` as in FileDevice. The settings that
    ``tiered bench`` has found there are used: threads, or the size and number of requests.
    """
    profile = load_profile(directory)

    def probe() -> str | None:
        return probe_uring(directory, deadline_s=deadline_s)

    return _open(directory, engine, profile, probe, deadline_s=deadline_s, direct=direct)


def open_external(
    paths: Sequence[str | os.PathLike[str]], engine: str = "auto", *, deadline_s: float = 60.0
) -> FileDevice:
    """Return a device that reads the files at ``paths``, numbered from 0, and never writes; the caller closes it.

    ``engine`` as in ``open_device``; the first file decides for all of them, and so do settings that were measured in
    its directory. Blocks for one or two reads of each file; nothing is written anywhere. ``external`` of the device
    knows the true lengths, and whether a file has changed. Raises UsageError for a file that is missing, unreadable,
    empty or not regular.
    """
    absolute = absolute_paths(paths)
    profile = load_profile(os.path.dirname(os.path.realpath(absolute[0])))

    def probe() -> str | None:
        fd = open_regular(absolute[0])
        try:
            return probe_uring_read(absolute[0], fd, deadline_s=deadline_s)
        finally:
            os.close(fd)

    return _open(absolute, engine, profile, probe, deadline_s=deadline_s, direct=None)


def _choose(profile: Profile | None, probe: Callable[[], str | None]) -> tuple[str, str]:
    if profile is not None and profile.engine in DEVICES and profile.engine != "uring":
        return profile.engine, f"it was the fastest when measured on {profile.measured_at[:10]}"
    refusal = probe()
    if refusal is not None:
        return "threads", refusal
    return "uring", "io_uring works here"


def _open(
    place: Place, engine: str, profile: Profile | None, probe: Callable[[], str | None], **options: Any
) -> FileDevice:
    """Return the device of ``place``; ``probe`` returns why io_uring does not work there, and ``options`` are all's."""
    if engine == "auto":
        engine, reason = _choose(profile, probe)
        if engine == "uring":
            try:
                return _cut_as_measured(UringDevice(place, **options), profile)
            except DeviceError as error:
                engine, reason = "threads", str(error)
        _say_once(f"engine {engine!r} instead of io_uring: {reason}")
    if engine == "uring":
        refusal = probe()
        if refusal is not None:
            name = os.fspath(place) if isinstance(place, str | os.PathLike) else place[0]
            raise DeviceError(f'{name}: engine="uring" does not work: {refusal}; give engine="auto"')
        return _cut_as_measured(UringDevice(place, **options), profile)
    if engine == "threads" and profile is not None and profile.engine == "threads":
        num_threads = min(max(profile.read_depth, profile.write_depth, 2), _MOST_THREADS)
        return ThreadsDevice(place, num_threads=num_threads, **options)
    if engine not in DEVICES:
        raise UsageError(f"engine={engine!r} is unknown; there is: {', '.join(map(repr, DEVICES))}")
    return DEVICES[engine](place, **options)


def _cut_as_measured(device: UringDevice, profile: Profile | None) -> UringDevice:
    """Have ``device`` move its bytes in requests as long, and as many, as were the best when they were measured."""
    if profile is not None:
        nbytes = min(max(profile.block_nbytes, _LEAST_REQUEST_NBYTES), _MOST_REQUEST_NBYTES)
        depth = max(_IN_FLIGHT_NBYTES // nbytes, profile.read_depth, profile.write_depth)
        device.cut(round_up(nbytes, device.alignment), min(depth, MOST_REQUESTS))
    return device


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)
