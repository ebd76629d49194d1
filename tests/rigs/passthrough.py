"""A FUSE file system over a directory: every call is carried out there; what goes wrong is for subclasses to say.

Nothing is cached by the kernel (FOPEN_DIRECT_IO, no validity of names), so each read and write arrives here.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from dataclasses import dataclass

from tests.rigs.fuse import FileSystem

__all__ = ["Passthrough"]

ROOT = 1
_DIRECT_IO, _PARALLEL_WRITES = 1 << 0, 1 << 6
_MODE, _UID, _GID, _SIZE, _FH = 1, 2, 4, 8, 64  # what setattr is to change
_KEPT = ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT)  # checked by the kernel, or no affair of the backing's


@dataclass(slots=True)
class Node:
    """One file or directory: a descriptor (O_PATH) that outlives its name, and how often the kernel refers to it."""

    fd: int
    key: tuple[int, int]
    name: str
    num_lookups: int = 0


class Passthrough(FileSystem):
    """The directory ``backing``, and nothing of its own. Thread-safe."""

    def __init__(self, backing: str) -> None:
        fd = os.open(backing, os.O_PATH | os.O_DIRECTORY)
        status = os.fstat(fd)
        self.backing = backing
        self._lock = threading.Lock()
        self._nodes = {ROOT: Node(fd, (status.st_dev, status.st_ino), "/", 1)}
        self._numbers = {self._nodes[ROOT].key: ROOT}
        self._next = ROOT + 1
        self._names: dict[int, str] = {}  # of open files, by descriptor

    # Below: for subclasses. ``name`` is what the file was called when it was last looked up.

    def pread(self, fd: int, nbytes: int, offset: int, name: str) -> bytes:
        return os.pread(fd, nbytes, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int, name: str) -> int:
        """Write, and return how many bytes are said to be written."""
        return os.pwrite(fd, data, offset)

    def flush(self, fd: int, name: str) -> None:
        """fsync or fdatasync. What is in the page cache is as safe as a test needs it."""

    def before(self, call: str, name: str) -> None:
        """``call`` is about to be carried out on ``name``; may raise OSError."""

    # Below: names

    def lookup(self, node: int, body: memoryview) -> bytes:
        return self._entry(node, _text(body))

    def forget(self, node: int, body: memoryview) -> None:
        self._forget(node, *struct.unpack_from("=Q", body))

    def forget_many(self, node: int, body: memoryview) -> None:
        (count,) = struct.unpack_from("=I", body)
        for index in range(count):
            self._forget(*struct.unpack_from("=QQ", body, 8 + 16 * index))

    def mkdir(self, node: int, body: memoryview) -> bytes:
        (mode,) = struct.unpack_from("=I", body)
        name = _text(body[8:])
        self.before("mkdir", name)
        os.mkdir(name, mode, dir_fd=self._directory(node))
        return self._entry(node, name)

    def unlink(self, node: int, body: memoryview) -> bytes:
        self.before("unlink", _text(body))
        os.unlink(_text(body), dir_fd=self._directory(node))
        return b""

    def rmdir(self, node: int, body: memoryview) -> bytes:
        os.rmdir(_text(body), dir_fd=self._directory(node))
        return b""

    def rename(self, node: int, body: memoryview, head: int = 8) -> bytes:
        (target,) = struct.unpack_from("=Q", body)
        old, new, *_ = bytes(body[head:]).split(b"\0")
        self.before("rename", new.decode())
        source, to = self._directory(node), self._directory(target)
        os.rename(os.fsdecode(old), os.fsdecode(new), src_dir_fd=source, dst_dir_fd=to)
        self._entry(target, os.fsdecode(new), count=False)  # which notes the new name
        return b""

    def rename2(self, node: int, body: memoryview) -> bytes:
        return self.rename(node, body, 16)

    def opendir(self, node: int, body: memoryview) -> bytes:
        return self._opened(os.open(self._path(node), os.O_RDONLY | os.O_DIRECTORY), self._nodes[node].name)

    def readdir(self, node: int, body: memoryview) -> bytes:
        fd, offset, nbytes = struct.unpack_from("=QQI", body)
        listing = b""
        for index, name in enumerate([".", "..", *sorted(os.listdir(fd))][offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("=QQII", index, index, len(raw), 0) + raw
            entry = entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            if len(listing) + len(entry) > nbytes:
                break
            listing += entry
        return listing

    def fsyncdir(self, node: int, body: memoryview) -> bytes:
        self.before("fsyncdir", self._nodes[node].name)
        return b""

    # Below: files

    def getattr(self, node: int, body: memoryview) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + _attributes(os.stat(self._nodes[node].fd))

    def setattr(self, node: int, body: memoryview) -> bytes:
        valid, _, fd, size = struct.unpack_from("=IIQQ", body)
        mode, _, uid, gid = struct.unpack_from("=IIII", body, 68)
        path = self._path(node)
        if valid & _MODE:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            os.chown(path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            self.before("truncate", self._nodes[node].name)
            os.truncate(fd if valid & _FH else path, size)
        return self.getattr(node, body)

    def create(self, node: int, body: memoryview) -> bytes:
        flags, mode = struct.unpack_from("=II", body)
        name = _text(body[16:])
        self.before("create", name)
        exclusive = (flags & os.O_EXCL) | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(name, (flags & _KEPT) | exclusive, mode, dir_fd=self._directory(node))
        return self._entry(node, name) + self._opened(fd, name)

    def open(self, node: int, body: memoryview) -> bytes:
        (flags,) = struct.unpack_from("=I", body)
        name = self._nodes[node].name
        self.before("open", name)
        return self._opened(os.open(self._path(node), flags & _KEPT), name)

    def release(self, node: int, body: memoryview) -> bytes:
        (fd,) = struct.unpack_from("=Q", body)
        del self._names[fd]  # order: before the number may be another file's
        os.close(fd)
        return b""

    def read(self, node: int, body: memoryview) -> bytes:
        fd, offset, nbytes = struct.unpack_from("=QQI", body)
        return self.pread(fd, nbytes, offset, self._names[fd])

    def write(self, node: int, body: memoryview) -> bytes:
        fd, offset, nbytes = struct.unpack_from("=QQI", body)
        return struct.pack("=II", self.pwrite(fd, body[40 : 40 + nbytes], offset, self._names[fd]), 0)

    def fsync(self, node: int, body: memoryview) -> bytes:
        (fd,) = struct.unpack_from("=Q", body)
        self.flush(fd, self._names[fd])
        return b""

    def fallocate(self, node: int, body: memoryview) -> bytes:
        fd, offset, nbytes, mode = struct.unpack_from("=QQQI", body)
        self.before("fallocate", self._names[fd])
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only plain fallocate")
        os.posix_fallocate(fd, offset, nbytes)
        return b""

    def statfs(self, node: int, body: memoryview) -> bytes:
        s = os.statvfs(self.backing)
        counts = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax, s.f_frsize, 0)
        return struct.pack("=QQQQQIIII", *counts).ljust(80, b"\0")

    # Below: nodes

    def _path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node].fd}"

    def _directory(self, node: int) -> int:
        return self._nodes[node].fd  # O_PATH serves as dir_fd

    def _opened(self, fd: int, name: str) -> bytes:
        self._names[fd] = name
        return struct.pack("=QIi", fd, _DIRECT_IO | _PARALLEL_WRITES, 0)

    def _entry(self, parent: int, name: str, *, count: bool = True) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd)
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = self._next
                self._next += 1
                self._nodes[number] = Node(fd, key, name)
            else:
                os.close(fd)
            self._nodes[number].name = name
            self._nodes[number].num_lookups += count
        return struct.pack("=QQQQII", number, 0, 0, 0, 0, 0) + _attributes(status)

    def _forget(self, number: int, num_lookups: int) -> None:
        with self._lock:
            node = self._nodes[number]
            node.num_lookups -= num_lookups
            if node.num_lookups <= 0 and number != ROOT:
                os.close(node.fd)
                del self._nodes[number], self._numbers[node.key]


def _text(body: memoryview) -> str:
    return os.fsdecode(bytes(body).split(b"\0", 1)[0])


def _attributes(s: os.stat_result) -> bytes:
    times = [int(t) for t in (s.st_atime, s.st_mtime, s.st_ctime)]
    parts = [ns % 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
    sizes = (s.st_ino, s.st_size, s.st_blocks)
    return struct.pack(
        "=QQQQQQIIIIIIIIII", *sizes, *times, *parts, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev, 4096, 0
    )
