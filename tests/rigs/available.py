"""Which rigs work on this machine, and why one does not: `python tests/rigs/available.py` lists them.

Imports nothing that has to be installed, so that scripts/rigs can ask before there is a .venv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["RIGS", "SEARCH_PATH", "needs", "off", "refusal"]

SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

_CAP_SYS_ADMIN = 1 << 21
_FUSE, _EXT4, _XFS = ("/dev/fuse", "fuse"), ("mkfs.ext4", "ext4"), ("mkfs.xfs", "xfs")

RIGS: dict[str, Sequence[tuple[str, str]]] = {
    "faulty file system": (_FUSE,),
    "torn drives": (_FUSE, ("/dev/loop-control", "loop"), _EXT4),
    "ext4 shutdown": (("/dev/loop-control", "loop"), _EXT4),
    "xfs shutdown": (("/dev/loop-control", "loop"), _XFS),
    "system calls": (("strace", "ptrace"),),
    "memory cgroup": (("/sys/fs/cgroup/memory", "cgroup v1"),),
    "blkio cgroup": (("/sys/fs/cgroup/blkio", "cgroup v1"), ("/dev/loop-control", "loop"), _EXT4),
}
"""What each rig takes besides root: a path or a command, and what it belongs to."""


def refusal(rig: str) -> str | None:
    """Return why ``rig`` cannot work here, None when it can."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if os.geteuid() != 0 or not int(status["CapEff"], 16) & _CAP_SYS_ADMIN:
        return "it takes root, with the right to mount"
    for what, of in RIGS[rig]:
        if what.startswith("/") and not os.access(what, os.R_OK | os.W_OK):
            return f"there is no {what} ({of})"
        if not what.startswith("/") and shutil.which(what, path=SEARCH_PATH) is None:
            return f"there is no {what}: scripts/rigs installs it where it can"
        if of in ("ext4", "fuse", "xfs") and not _is_known(of):
            return f"the kernel has no {of}"
    return None


def _is_known(file_system: str) -> bool:
    if file_system in Path("/proc/filesystems").read_text().split():
        return True
    modprobe = shutil.which("modprobe", path=SEARCH_PATH)
    return modprobe is not None and subprocess.run([modprobe, "-q", file_system], capture_output=True).returncode == 0


def off(rig: str, reason: str) -> str:
    """Return the words that a test of ``rig`` is skipped with; the suite's last lines repeat them."""
    return f"rig off: {rig}: {reason}"


def needs(rig: str) -> pytest.MarkDecorator:
    """Return the mark of a test that takes ``rig``: it is skipped where that is off, before any fixture is made."""
    import pytest

    reason = refusal(rig)
    return pytest.mark.skipif(reason is not None, reason=off(rig, reason or ""))


def main() -> None:
    """List the rigs."""
    for rig in RIGS:
        reason = refusal(rig)
        print(f"rig {'on' if reason is None else 'off'}: {rig}{'' if reason is None else f': {reason}'}")


if __name__ == "__main__":
    sys.exit(main())
