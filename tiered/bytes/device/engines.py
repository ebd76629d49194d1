"""The choice of an engine for a directory or for external files: the one asked for, or the best that works there.

Whether io_uring works is tried: in a directory by one write and read, for a file by one read.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiered.bytes.device.direct_io import open_unnamed
from tiered.bytes.device.external_files import absolute_paths, open_regular
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.profile import Profile, load_profile
from tiered.bytes.device.queue import MOST_REQUESTS
from tiered.bytes.device.ring import READ, WRITE, Ring
from tiered.bytes.device.threads import AiofilesDevice, MmapDevice, ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.bytes.private_file import opened
from tiered.errors import DeadlineError, DeviceError, UsageError
from tiered.units import KiB, MiB, round_up

__all__ = ["DEVICES", "choose_engine", "open_device", "open_external", "probe_uring", "probe_uring_read"]


_TRIAL_NBYTES = 4096
_abandoned: list[tuple[Ring, ctypes.c_char]] = []
"""Lifetime: the ring and the memory of trials that a drive did not answer in time."""


def probe_uring(directory: str | os.PathLike[str], *, deadline_s: float = 60.0) -> str | None:
    """Return why io_uring does not work in ``directory``, or None: a ring, one aligned write and read.

    Blocks, for ``deadline_s`` at most each. An operation that is late stays with the kernel, and its ring open.
    """
    try:
        with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            fd = open_unnamed(descriptor, 0)
    except OSError as error:
        return f"cannot make a file in {os.fspath(directory)}: {error.strerror}"
    expected = os.urandom(_TRIAL_NBYTES)

    def trial() -> str | None:
        num_written = _move_once(fd, memoryview(bytearray(expected)), deadline_s, is_write=True)
        if num_written != _TRIAL_NBYTES:
            return f"a trial write through io_uring moved {num_written} bytes of {_TRIAL_NBYTES}"
        return _read_trial(fd, expected, deadline_s)

    try:
        return _refusal(os.fspath(directory), trial)
    finally:
        os.close(fd)


def probe_uring_read(path: str, fd: int, *, deadline_s: float = 60.0) -> str | None:
    """Return why io_uring does not read ``path``, open and buffered as ``fd``, or None: a ring, one read.

    Blocks as ``probe_uring`` does. Nothing is written.
    """
    return _refusal(path, lambda: _read_trial(fd, os.pread(fd, _TRIAL_NBYTES, 0), deadline_s))


def _refusal(name: str, trial: Callable[[], str | None]) -> str | None:
    """Return what ``trial`` returns, or the error that it ended with in ``name``."""
    try:
        return trial()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return f"it could not be tried in {name}: {error.strerror}"
        return f"io_uring is refused here: {error.strerror}" + _hint(error.errno)
    except DeviceError as error:
        return str(error)


def _read_trial(fd: int, expected: bytes, deadline_s: float) -> str | None:
    page = bytearray(_TRIAL_NBYTES)
    num_read = _move_once(fd, memoryview(page), deadline_s, is_write=False)
    if num_read == len(expected) and page.startswith(expected):
        return None
    return f"a trial through io_uring read {num_read} bytes of {len(expected)}, or others"


def _hint(number: int | None) -> str:
    if number in {errno.EPERM, errno.EACCES}:
        return " (a container's seccomp filter, or /proc/sys/kernel/io_uring_disabled)"
    return " (this kernel has none)" if number == errno.ENOSYS else ""


def _move_once(fd: int, memory: memoryview, deadline_s: float, *, is_write: bool) -> int:
    """Move ``memory`` at the start of ``fd`` through a ring of its own and return how many bytes; blocks.

    Raises OSError, and DeadlineError with all that the kernel has kept for good.
    """
    ring = Ring(1)
    is_in_flight = False
    try:
        ring.register_files(1)
        ring.set_file(0, fd)
        pinned = ctypes.c_char.from_buffer(memory)
        ring.prepare(WRITE if is_write else READ, 0, ctypes.addressof(pinned), len(memory), 0, 0)
        completions: list[tuple[int, int, int]] = []
        end_s = time.monotonic() + deadline_s
        is_in_flight = True
        while not completions:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"a trial {'write' if is_write else 'read'} through io_uring did not complete within "
                    f"{deadline_s:g} s: check the drive"
                )
            ring.enter(1, min(1.0, left_s))
            completions = ring.completions()
        is_in_flight = False
        result = completions[0][1]
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result
    finally:
        if is_in_flight:
            _abandoned.append((ring, pinned))
        else:
            ring.close()


# -- engines -----------------------------------------------------------------------------------------------------------


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
                return _open_uring(place, profile, options)
            except DeviceError as error:
                engine, reason = "threads", str(error)
        message = f"engine {engine!r} instead of io_uring: {reason}"
        if message not in _said:
            _said.add(message)
            _log.warning("%s", message)
    if engine == "uring":
        refusal = probe()
        if refusal is not None:
            name = os.fspath(place) if isinstance(place, str | os.PathLike) else place[0]
            raise DeviceError(f'{name}: engine="uring" does not work: {refusal}; give engine="auto"')
        return _open_uring(place, profile, options)
    if engine == "threads" and profile is not None and profile.engine == "threads":
        num_threads = min(max(profile.read_depth, profile.write_depth, 2), _MOST_THREADS)
        return ThreadsDevice(place, num_threads=num_threads, **options)
    if engine not in DEVICES:
        raise UsageError(f"engine={engine!r} is unknown; there is: {', '.join(map(repr, DEVICES))}")
    return DEVICES[engine](place, **options)


def _open_uring(place: Place, profile: Profile | None, options: dict[str, Any]) -> UringDevice:
    """Return a device whose requests are as long, and as many, as were the best when they were measured."""
    device = UringDevice(place, **options)
    if profile is not None:
        nbytes = min(max(profile.block_nbytes, _LEAST_REQUEST_NBYTES), _MOST_REQUEST_NBYTES)
        depth = max(_IN_FLIGHT_NBYTES // nbytes, profile.read_depth, profile.write_depth)
        device.cut(round_up(nbytes, device.alignment), min(depth, MOST_REQUESTS))
    return device
