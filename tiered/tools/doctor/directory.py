"""Checks of one directory, a function each. They make unnamed files only, and leave nothing."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from tiered.bytes.device.direct import open_unnamed
from tiered.bytes.device.engines import choose_engine
from tiered.bytes.device.mount import RAM_COST, RAM_MEND, find_mount
from tiered.bytes.device.profile import Profile, find_profile
from tiered.tools.doctor.description import directory_description
from tiered.tools.doctor.drive import by_drive
from tiered.tools.doctor.finding import MACHINE, Check, Finding, broken, ok, slower
from tiered.units import KiB, MiB, format_bytes, format_count

__all__ = ["directory_checks", "drive_checks"]

_PARAM_NBYTES = 31  # the most space that training takes per parameter; see tiered/tools/train/plan.py
_LEAST_FREE_NBYTES = 64 * MiB  # below it no store of any use grows
_BLOCK_NBYTES = 4 * KiB
_NUM_FLUSHES = 5
# Flash takes longer than the first to keep a block, so a volatile cache that answers sooner was not written out; a good
# drive does not take as long as the second.
_FAST_FLUSH_S, _SLOW_FLUSH_S = 100e-6, 50e-3
_OLD_DAYS = 180
_LACKS = {  # of each kind of file system
    "memory": (broken, "", RAM_COST, RAM_MEND),
    "network": (
        broken, " is on another machine",
        "commits are not supported: a server may lose what was flushed, and locks may not hold",
        "use a directory on a drive of this machine",
    ),
    "overlay": (
        slower, " is a container's layer",
        "not measured here; files of a container's layer are copied when first written, and go with it",
        "put a directory of the host there: docker run -v /nvme/run:/run/store",
    ),
    "fuse": (
        slower, " is served by a program",
        "not measured here; every operation passes through one more process",
        "use a directory on a drive",
    ),
}  # fmt: skip


def directory_checks(directory: str) -> list[Check]:
    """Return the checks of ``directory``, in an order: where it cannot be written to, the others make no sense."""
    named: dict[str, Callable[[str], Finding]] = {
        "writing": check_writing,
        "file system": check_file_system,
        "free space": check_free_space,
        "direct I/O": check_direct,
        "engine": check_engine,
        "flush": check_flush,
        "profile": check_profile,
    }
    return [
        Check(directory, name, functools.partial(run, directory), is_essential=name == "writing")
        for name, run in named.items()
    ]


def drive_checks(directories: Sequence[str]) -> list[Check]:
    """Return the check that several directories lie on several drives; none for a single directory."""
    if len(directories) < 2:
        return []
    return [Check(MACHINE, "drives", functools.partial(check_drives, directories))]


def check_writing(directory: str) -> Finding:
    """Make an unnamed file and write one block to it."""
    name, cost = "writing", "no store can be kept here"
    try:
        with _unnamed(directory) as fd:
            os.pwrite(fd, bytes(_BLOCK_NBYTES), 0)
            os.fdatasync(fd)
    except OSError as error:
        reason, quoted, mount = error.strerror or str(error), shlex.quote(directory), find_mount(directory)
        mount_point = mount.mount_point if mount else directory
        mend = {
            errno.ENOENT: f"mkdir -p -m 700 {quoted}",
            errno.ENOTDIR: "name a directory",
            errno.EACCES: f"as root: chown {os.geteuid()} {quoted}",
            errno.EPERM: f"as root: chown {os.geteuid()} {quoted}",
            errno.EROFS: f"as root: mount -o remount,rw {mount_point}; dmesg says why it is read-only",
            errno.ENOSPC: "remove files there, or use another directory",
            errno.EDQUOT: "raise the quota, or remove files",
            errno.EMFILE: "ulimit -n 65536",
        }.get(error.errno or 0, "see the kernel log (dmesg) for this drive")
        return broken(directory, name, f"a block could not be written: {reason}", cost=cost, mend=mend)
    return ok(directory, name, "a block was written to an unnamed file and flushed")


def check_file_system(directory: str) -> Finding:
    """Look up the kind of place that keeps the bytes, by the name of the file system."""
    name = "file system"
    mount = find_mount(directory)
    if mount is None:
        return ok(directory, name, "not readable from /proc/self/mountinfo")
    if mount.kind == "local":
        return ok(directory, name, str(mount))
    judge, what, cost, mend = _LACKS[mount.kind]
    return judge(directory, name, f"{mount}{what}", cost=cost, mend=mend)


def check_free_space(directory: str) -> Finding:
    """Count the bytes that are free for us, and the parameters that they hold."""
    name = "free space"
    free_nbytes = shutil.disk_usage(directory).free
    params = format_count(free_nbytes // _PARAM_NBYTES)
    found = f"{format_bytes(free_nbytes)}: trains at least {params} parameters at up to {_PARAM_NBYTES} bytes each"
    if free_nbytes < _LEAST_FREE_NBYTES:
        mend = "remove files there, or use another directory"
        return broken(directory, name, found, cost="a store cannot grow", mend=mend)
    return ok(directory, name, found)


def check_direct(directory: str) -> Finding:
    """Write and read one aligned block with O_DIRECT."""
    name = "direct I/O"
    described = directory_description(directory)
    if described.direct_refusal is None:
        found = f"a block was written and read past the page cache, aligned to {described.direct_alignment:,}"
        return ok(directory, name, found)
    cost = "buffered reads run at 0.6 instead of 3.5 GB/s, and take page cache"
    return slower(directory, name, described.direct_refusal, cost=cost, mend="use a directory on ext4 or XFS")


def check_engine(directory: str) -> Finding:
    """Ask which engine a store would take here."""
    name = "engine"
    profile, _ = find_profile(directory)
    engine, reason = choose_engine(directory, profile)
    found = f"{engine}: {reason}"
    if engine == "uring" or (profile is not None and profile.engine == engine):
        return ok(directory, name, found)
    cost = "beside a busy Python thread 7 instead of 96 % of the drive"
    return slower(directory, name, found, cost=cost, mend="mend io_uring; see there")


def check_flush(directory: str) -> Finding:
    """Time fdatasync of an overwritten block, the wait of each commit, several times."""
    name = "flush"
    described = directory_description(directory)
    with _unnamed(directory) as fd:
        os.pwrite(fd, os.urandom(_BLOCK_NBYTES), 0)
        os.fsync(fd)  # order: from here on, only data is flushed
        took = []
        for _ in range(_NUM_FLUSHES):
            os.pwrite(fd, os.urandom(_BLOCK_NBYTES), 0)
            start = time.perf_counter()
            os.fdatasync(fd)
            took.append(time.perf_counter() - start)
    median_s = statistics.median(took)
    found = f"fdatasync of {format_bytes(_BLOCK_NBYTES)} takes {1e3 * median_s:.3g} ms"
    if described.kind == "memory":
        return ok(directory, name, f"{found}: there is no drive to wait for")
    cache = described.block_device and described.block_device.write_cache
    if median_s < _FAST_FLUSH_S and cache == "write back":
        found += ": suspiciously fast for a drive that says it has a volatile cache"
        mend = "none from here; unless it is safe against power cuts, so are commits not: ask who runs the virtual disk"
        return ok(directory, name, found, mend=mend)
    if median_s > _SLOW_FLUSH_S:
        cost = "each commit waits for several of them"
        return slower(directory, name, found, cost=cost, mend="look for other work on the drive: iostat -x 1")
    return ok(directory, name, f"{found} (write cache: {cache or 'not readable'})")


def check_profile(directory: str) -> Finding:
    """Look for the measurement of ``tiered bench``, and its age."""
    name, mend = "profile", f"tiered bench {shlex.quote(directory)}"
    profile, complaints = find_profile(directory)
    if complaints:
        cost = "a store opens with settings that were not measured here"
        return slower(directory, name, "; ".join(complaints), cost=cost, mend=f"remove it, then: {mend}")
    if profile is None:
        return ok(directory, name, "the drive was not measured yet", mend=mend)
    found, is_stale = _described(profile)
    return ok(directory, name, found, mend=mend if is_stale else "")


def _described(profile: Profile) -> tuple[str, bool]:
    """Return the figures of ``profile``, and whether it is time to measure again."""
    when = datetime.fromisoformat(profile.measured_at)
    days = (datetime.now(UTC) - (when if when.tzinfo else when.replace(tzinfo=UTC))).days
    is_other_kernel = profile.kernel != os.uname().release
    ago = f"{days} days ago" if days > 1 else "yesterday" if days else "today"
    found = (
        f"measured {ago}: reads {profile.read_bytes_per_s / 1e9:.2f} GB/s, "
        f"writes {profile.write_bytes_per_s / 1e9:.2f} GB/s with {profile.engine}, "
        f"blocks of {format_bytes(profile.block_nbytes)}"
    )
    if is_other_kernel:
        found += f", on Linux {profile.kernel}"
    return found, is_other_kernel or not 0 <= days <= _OLD_DAYS


def check_drives(directories: Sequence[str]) -> Finding:
    """Look whether the directories lie on different drives."""
    name, drives = "drives", by_drive(directories)
    shared = [f"{', '.join(which)} lie on one drive, {drive}" for drive, which in drives.items() if drive and which[1:]]
    if not shared:
        known = [drive for drive in drives if drive]
        where = f"{len(directories)} directories on {len(known)} drives: {', '.join(known) or 'not known'}"
        return ok(MACHINE, name, where)
    cost = "striping over them gains nothing: they share its bandwidth"
    return slower(MACHINE, name, "; ".join(shared), cost=cost, mend="give one directory of each drive")


@contextmanager
def _unnamed(directory: str) -> Iterator[int]:
    """Open an unnamed file in ``directory``; it goes with the block."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_unnamed(descriptor, 0)
    finally:
        os.close(descriptor)
    try:
        yield fd
    finally:
        os.close(fd)
