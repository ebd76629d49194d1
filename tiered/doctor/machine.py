"""Checks of this machine and this process, for any directory; a function each."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import platform
import re
import resource
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil

from tiered.bytes import kernel_file
from tiered.bytes.arena import Arena
from tiered.bytes.device.ring import Ring
from tiered.doctor.finding import MACHINE, Check, Finding, broken, ok, slower
from tiered.errors import DeviceError
from tiered.units import KiB, MiB, format_bytes

__all__ = ["machine_checks"]

_IO_URING_SETTING = Path("/proc/sys/kernel/io_uring_disabled")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TRIAL_NBYTES = 64 * MiB
_NUM_ENTRIES, _FEWEST_ENTRIES = 256, 16  # as many as the engine asks for, and contents itself with
_NUM_RINGS = 4  # of a store in as many directories; from about Linux 6.14 on each counts as locked memory
_FEWEST_FILES = 128
_RAISE_MEMLOCK = (
    "ulimit -l unlimited; where that is refused, as root: '* - memlock unlimited' in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity in a service, --ulimit memlock=-1 for a container"
)
_SQLITE = (3, 33)  # the first with sqlite_schema


def machine_checks() -> list[Check]:
    """Return the quick checks of the machine."""
    named = {
        "io_uring": check_io_uring,
        "huge pages": check_huge_pages,
        "locked memory": check_memlock,
        "open files": check_open_files,
        "SQLite": check_sqlite,
    }
    return [Check(MACHINE, name, run) for name, run in named.items()]


def check_io_uring() -> Finding:
    """Set up a ring as the engine does: a small one where the limit on locked memory does not allow a large one."""
    name = "io_uring"
    cost = "engine threads instead: as fast while Python is idle, 7 instead of 96 % of the drive beside a busy thread"
    try:
        mode = _mode_of_ring(_NUM_ENTRIES) or _mode_of_ring(_FEWEST_ENTRIES)
    except DeviceError as error:
        return slower(MACHINE, name, str(error), cost=cost, mend="run a newer kernel on x86-64 or aarch64")
    except OSError as error:
        reason, mend = _refusal(error.errno)
        return slower(MACHINE, name, f"the kernel refused a ring: {error.strerror}; {reason}", cost=cost, mend=mend)
    if mode is None:
        reason, mend = _refusal(errno.ENOMEM)
        return slower(MACHINE, name, f"the kernel refused a ring: {reason}", cost=cost, mend=mend)
    return ok(MACHINE, name, f"a ring was set up on Linux {platform.release()}, mode {mode}")


def _mode_of_ring(num_entries: int) -> str | None:
    """Return the mode of a ring of ``num_entries``; None where there is too little memory for it. Raises OSError."""
    try:
        with closing(Ring(num_entries)) as ring:
            return ring.mode
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None


def _refusal(number: int | None) -> tuple[str, str]:
    """Return why io_uring_setup failed with errno ``number``, and how to mend it."""
    has_filter = re.search(r"^Seccomp:\s*2$", kernel_file.text(Path("/proc/self/status")) or "", re.MULTILINE)
    setting = kernel_file.number(_IO_URING_SETTING)
    if number == errno.EPERM and setting:
        return f"{_IO_URING_SETTING} says {setting}", "as root: sysctl kernel.io_uring_disabled=0"
    if has_filter and number in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
        return (
            "a seccomp filter is in force, as containers have it",
            "start the container with --security-opt seccomp=unconfined, or a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register",
        )
    if number == errno.ENOSYS:
        return f"Linux {platform.release()} has none", "run Linux 5.11 or newer, built with CONFIG_IO_URING"
    if number == errno.ENOMEM:
        return "its memory is over the limit on locked memory", _RAISE_MEMLOCK
    if number == errno.EMFILE:
        return "too many files are open", "raise the limit: ulimit -n 65536"
    return "no reason is known for that", "look whether a security module (SELinux, AppArmor) forbids it"


def check_huge_pages() -> Finding:
    """Touch memory of an arena and look at the pages that the kernel gave it."""
    name = "huge pages"
    arena = Arena(_TRIAL_NBYTES)
    buffer = arena.allocate_nowait(_TRIAL_NBYTES)
    assert buffer is not None  # the arena is new and as large
    try:
        ctypes.memset(buffer.address, 1, buffer.nbytes)
        huge_nbytes = _huge_nbytes(buffer.address, kernel_file.text(Path("/proc/self/smaps"), 64 * MiB) or "")
    finally:
        arena.release(buffer)
        arena.close()
    found = f"{format_bytes(huge_nbytes)} of {format_bytes(_TRIAL_NBYTES)} of an arena lie on huge pages"
    if huge_nbytes >= 0.9 * _TRIAL_NBYTES:
        return ok(MACHINE, name, found)
    setting = kernel_file.choice(_THP)
    if setting in (None, "never"):
        found += f"; {_THP} {'says never' if setting else 'is missing'}"
        mend = f"as root: echo madvise > {_THP}" if setting else "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    elif "THP_enabled:\t0" in (kernel_file.text(Path("/proc/self/status")) or ""):
        found += "; they are switched off for this process (prctl PR_SET_THP_DISABLE)"
        mend = "start it from a program that does not do that"
    else:
        found += "; memory is short or fragmented"
        mend = "as root: echo 1 > /proc/sys/vm/compact_memory"
    cost = "4 MiB blocks, 8 in flight: reads 1.1 instead of 3.5 GB/s, writes 2.9 instead of 6.5"
    return slower(MACHINE, name, found, cost=cost, mend=mend)


def _huge_nbytes(address: int, smaps: str) -> int:
    """Return the bytes on huge pages in the mapping of ``address``."""
    is_ours = False
    for line in smaps.splitlines():
        start = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if start:
            is_ours = int(start[1], 16) <= address < int(start[2], 16)
        elif is_ours and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * KiB
    return 0


def check_memlock() -> Finding:
    """Set up as many rings as several directories need: they may count as locked memory."""
    name = "locked memory"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"the limit is {'unlimited' if soft == resource.RLIM_INFINITY else format_bytes(soft)}"
    with contextlib.ExitStack() as rings:
        made: list[Ring] = []
        try:
            while len(made) < _NUM_RINGS:
                made.append(rings.enter_context(closing(Ring(_NUM_ENTRIES))))
        except (OSError, DeviceError) as error:
            if getattr(error, "errno", None) != errno.ENOMEM:
                return ok(MACHINE, name, f"{found}; without io_uring nothing asks for it")
    if len(made) == _NUM_RINGS:
        return ok(MACHINE, name, found)
    return slower(
        MACHINE,
        name,
        f"{found}; {len(made)} of {_NUM_RINGS} rings could be set up at once",
        cost="a directory whose ring does not fit gets a smaller one, then threads; see io_uring",
        mend=_RAISE_MEMLOCK,
    )


def check_open_files() -> Finding:
    """Compare the limit on open files with the number of open ones."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = psutil.Process().num_fds()
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    found = f"the limit is {limit}, {num_open} are open"
    if soft == resource.RLIM_INFINITY or soft - num_open >= _FEWEST_FILES:
        return ok(MACHINE, name, found)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    mend = f"ulimit -n {wanted}"
    if wanted - num_open < _FEWEST_FILES:
        mend = "as root: add 'LimitNOFILE=65536' to the service, or '* hard nofile 65536' to /etc/security/limits.conf"
    cost = "a store has a few open in each directory, training its data and sockets: it stops with EMFILE"
    return broken(MACHINE, name, found, cost=cost, mend=mend)


def check_sqlite() -> Finding:
    """Try the SQLite that Python was built with as the catalog uses it."""
    name, version = "SQLite", sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < _SQLITE:
        needed = ".".join(map(str, _SQLITE))
        mend = f"use a Python that has SQLite {needed} or newer"
        return broken(MACHINE, name, f"{version} is older than {needed}", cost="no store can be opened", mend=mend)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE trial (one INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        connection.execute("INSERT OR REPLACE INTO trial VALUES (1, zeroblob(4096))")
        tables = connection.execute("SELECT name FROM sqlite_schema").fetchall()
    assert tables == [("trial",)], tables
    return ok(MACHINE, name, f"version {version}")
