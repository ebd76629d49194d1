"""File systems to try a device on: made for one test as root, and gone after it, also when the test is killed."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.rigs.available import off

SHM = Path("/dev/shm")
_CAP_SYS_ADMIN = 1 << 21
_KEEP = 'cat >/dev/null; umount "$1" || umount -l "$1"'


def plain(directory: Path) -> AbstractContextManager[Path]:
    """Wherever the tests run."""
    return nullcontext(directory)


@contextmanager
def tmpfs(directory: Path) -> Iterator[Path]:
    """Memory: direct I/O works or not, depending on the kernel."""
    if not os.access(SHM, os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHM) as shm:
        yield Path(shm)


@contextmanager
def four_k_native(directory: Path) -> Iterator[Path]:
    """ext4 on a drive with sectors of 4 KiB, which refuses anything finer."""
    _need_root("a drive with sectors of 4 KiB")
    image, mount = directory / "image", directory / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    loop = _run("losetup", "-b", "4096", "--direct-io=on", "--find", "--show", str(image))
    try:
        _run("mkfs.ext4", "-q", loop)
        _run("mount", loop, str(mount))
    finally:
        _run("losetup", "-d", loop)  # goes when the last one who uses it does: with the mount
    with _mounted(mount):
        (mount / "data").mkdir(mode=0o700)
        yield mount / "data"
    image.unlink()


@contextmanager
def overlay(directory: Path) -> Iterator[Path]:
    """The file system of containers."""
    _need_root("an overlay")
    for name in ("lower", "upper", "work", "mount"):
        (directory / name).mkdir()
    options = ",".join(f"{name}dir={directory / name}" for name in ("lower", "upper", "work"))
    _run("mount", "-t", "overlay", "overlay", "-o", options, str(directory / "mount"))
    with _mounted(directory / "mount"):
        yield directory / "mount"


PLACES: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {
    "plain": plain,
    "tmpfs": tmpfs,
    "4kn": four_k_native,
    "overlay": overlay,
}


@contextmanager
def _mounted(mount: Path) -> Iterator[None]:
    """Unmount at the end. A process of its own does it, which sees its input end however this one ends."""
    keeper = subprocess.Popen(["sh", "-c", _KEEP, "keeper", str(mount)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()
    assert not os.path.ismount(mount), f"{mount} is still mounted"


def _need_root(what: str) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if os.geteuid() != 0 or not int(status["CapEff"], 16) & _CAP_SYS_ADMIN:
        pytest.skip(off(what, "it takes root, with the right to mount"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
