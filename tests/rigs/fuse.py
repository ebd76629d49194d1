"""The kernel's FUSE protocol, spoken over /dev/fuse by a few threads: a file system is a class with a method per call.

No library stands between: whoever may mount needs nothing installed. Numbers and layouts are of <linux/fuse.h>, 7.31.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import traceback
from typing import ClassVar

__all__ = ["MAX_NBYTES", "FileSystem", "mount", "serve"]

MAX_NBYTES = 1 << 20  # of one read or write
_IN = struct.Struct("=IIQQIIIHH")  # length, opcode, unique, node, uid, gid, pid, extensions, padding
_OUT = struct.Struct("=IiQ")  # length, -errno, unique
_INIT, _INTERRUPT = 26, 36
_FORGETS = {2: "forget", 42: "forget_many"}  # the kernel wants no answer
_CALLS = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 14: "open",
    15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 27: "opendir", 28: "readdir",
    29: "release", 30: "fsyncdir", 35: "create", 43: "fallocate", 45: "rename2",
}  # fmt: skip
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
_NOSUID_NODEV = 2 | 4


class FileSystem:
    """What is mounted. A method of ``CALLS`` gets the node and the rest of the request, and returns the reply's body.

    It raises OSError for an error, and ENOSYS is answered for what is not there. Methods are called by several threads.
    """

    num_threads: ClassVar[int] = 8

    def forget(self, node: int, body: memoryview) -> None:
        """The kernel gives back references to ``node``."""

    def forget_many(self, node: int, body: memoryview) -> None:
        """The kernel gives back references to many nodes."""


def mount(directory: str, name: str) -> int:
    """Mount on ``directory`` and return the descriptor to serve. Raises OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={MAX_NBYTES}"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_NOSUID_NODEV)
    if libc.mount(name.encode(), directory.encode(), b"fuse.tiered-rig", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        os.close(fd)
        raise OSError(number, f"mount on {directory}: {os.strerror(number)}")
    return fd


def serve(fd: int, files: FileSystem) -> None:
    """Answer requests until the file system is unmounted; blocks."""
    threads = [threading.Thread(target=_serve, args=(fd, files)) for _ in range(files.num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)


def _serve(fd: int, files: FileSystem) -> None:
    buffer = bytearray(MAX_NBYTES + 4096)
    view = memoryview(buffer)
    while True:
        try:
            nbytes = os.readv(fd, [buffer])
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: interrupted before we had it
                continue
            return  # ENODEV: unmounted
        _, opcode, unique, node, *_ = _IN.unpack_from(buffer)
        body = view[_IN.size : nbytes]
        if opcode in _FORGETS:
            getattr(files, _FORGETS[opcode])(node, body)
        elif opcode != _INTERRUPT:  # who interrupts waits for the answer all the same
            _answer(fd, unique, *_carry_out(files, opcode, node, body))


def _carry_out(files: FileSystem, opcode: int, node: int, body: memoryview) -> tuple[int, bytes]:
    if opcode == _INIT:
        return 0, _init(body)
    call = getattr(files, _CALLS.get(opcode, ""), None)
    if call is None:
        return errno.ENOSYS, b""
    try:
        return 0, call(node, body)
    except OSError as error:
        return error.errno or errno.EIO, b""
    except Exception:  # a bug here must not leave a caller without an answer
        traceback.print_exc()
        return errno.EIO, b""


def _answer(fd: int, unique: int, number: int, body: bytes) -> None:
    try:
        os.writev(fd, [_OUT.pack(_OUT.size + len(body), -number, unique), body])
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):  # whoever asked is gone, or the mount is
            raise


def _init(body: memoryview) -> bytes:
    _, _, max_readahead, offered = struct.unpack_from("=IIII", body)
    flags = offered & (_ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES)
    words = struct.pack("=IIIIHHIIHH", 7, 31, max_readahead, flags, 64, 48, MAX_NBYTES, 1, MAX_NBYTES // 4096, 0)
    return words.ljust(64, b"\0")
