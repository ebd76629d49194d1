"""io_uring through ctypes: the three system calls, the two shared rings, nothing of devices or operations.

The layout is <linux/io_uring.h>'s; the system calls have the same numbers on x86-64 and aarch64. Needs Linux 5.11 (a
wait with a timeout).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiered.bytes.arena import DONTFORK, MAP_FAILED, advise, libc
from tiered.errors import DeviceError

__all__ = ["READ", "WRITE", "Ring", "address_of", "pin"]

_ASYNC_CANCEL, READ, WRITE = 14, 22, 23  # opcodes

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}  # a full fence, which Python has no other word for
_PRIVATE_EXPEDITED, _REGISTER_PRIVATE_EXPEDITED = 1 << 3, 1 << 4

_SETUP_CLAMP, _SETUP_COOP_TASKRUN = 1 << 4, 1 << 8
_MODES = {"COOP_TASKRUN": _SETUP_COOP_TASKRUN, "plain": 0}  # the first from Linux 5.19
# Not SINGLE_ISSUER|DEFER_TASKRUN: there linked submissions begin, and completions are posted, in our own system calls
# alone, so not while the thread waits for the interpreter's lock (bench/LOG.md).
_FEATURE_SINGLE_MMAP, _FEATURE_NODROP, _FEATURE_EXT_ARG = 1 << 0, 1 << 1, 1 << 8
_NEEDED_FEATURES = _FEATURE_SINGLE_MMAP | _FEATURE_NODROP | _FEATURE_EXT_ARG
_GETEVENTS = 1 << 0
_WAIT = _GETEVENTS | 1 << 3  # with a timeout (EXT_ARG)
_REGISTER_FILES, _REGISTER_FILES_UPDATE = 2, 6
_OFFSET_RINGS, _OFFSET_SQES = 0, 0x10000000
_FIXED_FILE, _LINK = 1 << 0, 1 << 2
_PAUSES_S = (0.005, 0.02, 0.05, 0)  # after ENOMEM: a closed ring is taken off the user's locked memory a little later

_PARAMS = struct.Struct("=10I 8IQ 8IQ")  # 5 words, features, wq_fd, 3 reserved; offsets in the two rings
_SQE_NBYTES = 64
_SQE = struct.Struct("=BBHiQQIIQ")  # its first 40 bytes; the rest stays 0
_SQE_DTYPE = np.dtype(
    {
        "names": ["opcode", "flags", "file", "offset", "address", "nbytes", "tag"],
        "formats": ["u1", "u1", "i4", "u8", "u8", "u4", "u8"],
        "offsets": [0, 1, 4, 8, 16, 24, 32],
        "itemsize": _SQE_NBYTES,
    }
)
_CQE = struct.Struct("=QiI")
_GETEVENTS_ARG = struct.Struct("=QIIQ")
_TIMESPEC = struct.Struct("=qq")

Words = NDArray[np.int64]
_system_call = libc().syscall
_brief_call = ctypes.PyDLL(None, use_errno=True).syscall  # keeps the interpreter's lock: for calls that never wait
for _call in (_system_call, _brief_call):
    _call.argtypes = [ctypes.c_long] * 7
    _call.restype = ctypes.c_long
_MAP_POPULATE = 0x8000


address_of = ctypes.addressof
"""The address of the result of ``pin``."""


class _ReadOnly(ctypes.c_char):
    """The first byte of read-only memory, which ctypes takes by its address alone."""

    array: NDArray[np.uint8]  # lifetime: holds the memory


def pin(memory: memoryview, *, is_read_only: bool = False) -> ctypes.c_char:
    """Return an object at the address of ``memory`` that keeps it mapped for as long as the object lives.

    Raises TypeError for read-only memory unless ``is_read_only`` says that nothing will be written to it, and
    ValueError for memory that was released or has no bytes.
    """
    try:
        return ctypes.c_char.from_buffer(memory)
    except TypeError:
        if not is_read_only:
            raise
    array = np.frombuffer(memory, dtype=np.uint8)
    pinned = _ReadOnly.from_address(array.ctypes.data)
    pinned.array = array
    return pinned


class Ring:
    """One io_uring. One thread makes it, uses it and closes it; nothing here is locked.

    Memory and descriptors that the kernel was given must live until their completion was seen or the ring is closed.
    """

    def __init__(self, num_entries: int) -> None:
        """Set up a ring of ``num_entries`` submissions, with the cheapest completions this kernel has.

        Raises OSError (ENOSYS, EPERM: refused; ENOMEM; EMFILE) and DeviceError (a kernel before 5.11).
        """
        self.mode, self._fd, params = _set_up(num_entries)
        self._mappings: list[tuple[int, int]] = []
        self._tail = 0  # how many submissions were written, ever; the kernel's words are its low 32 bits
        self._num_submitted = 0  # of those
        self._head = 0  # of completions, as a new ring has it
        try:
            self._map(params)
        except BaseException:
            self.close()
            raise
        # Order: the tail must be read before the entries it covers; x86-64 never reorders loads. (An entry that was
        # read is not written again before its place has been free for a whole turn: the kernel's ring is twice what we
        # have in flight.)
        self._needs_fence = platform.machine() != "x86_64"
        if self._needs_fence:
            _system_call(_MEMBARRIER[platform.machine()], _REGISTER_PRIVATE_EXPEDITED, 0, 0, 0, 0, 0)
        # Lifetime: the kernel reads these during ``enter``.
        self._timeout = ctypes.create_string_buffer(_TIMESPEC.size)
        self._wait_argument = ctypes.create_string_buffer(_GETEVENTS_ARG.size)
        _GETEVENTS_ARG.pack_into(self._wait_argument, 0, 0, 8, 0, ctypes.addressof(self._timeout))
        self._wait_address = ctypes.addressof(self._wait_argument)
        self._timeout_s = -1.0

    @property
    def fd(self) -> int:
        """The ring's descriptor; -1 once closed."""
        return self._fd

    @property
    def num_free(self) -> int:
        """How many submissions can be written before the next ``enter``."""
        return self.num_entries - (self._tail - self._num_submitted)

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int) -> None:
        """Write a submission for the next ``enter``; there must be room (``num_free``).

        ``file`` is the slot of a registered file, ``address`` that of ``nbytes`` bytes of memory, ``offset`` the place
        in the file in bytes, ``tag`` the one that its completion will carry.
        """
        _SQE.pack_into(
            self._sqes, (self._tail & self._mask) * _SQE_NBYTES,
            opcode, _FIXED_FILE, 0, file, offset, address, nbytes, 0, tag,
        )  # fmt: skip
        self._tail += 1

    def prepare_reads(self, files: Words, addresses: Words, nbytes: Words, offsets: Words, tags: Words) -> None:
        """Write a submission to read for each of the arrays' numbers, as ``prepare``; there must be room for all."""
        entries = np.zeros(len(tags), _SQE_DTYPE)
        entries["opcode"], entries["flags"] = READ, _FIXED_FILE
        entries["file"], entries["address"], entries["nbytes"] = files, addresses, nbytes
        entries["offset"], entries["tag"] = offsets, tags
        self._entries[self._tail + np.arange(len(tags)) & self._mask] = entries
        self._tail += len(tags)

    def link(self) -> None:
        """Let the kernel begin the last submission prepared when the one before it has completed, by itself.

        Should that one fail or fall short, the last completes with ECANCELED, not begun.
        """
        self._sqes[(self._tail - 2 & self._mask) * _SQE_NBYTES + 1] |= _LINK

    def prepare_cancel(self, target: int, tag: int) -> None:
        """Write a request to cancel the submission tagged ``target``, if it has not begun."""
        place = (self._tail & self._mask) * _SQE_NBYTES
        _SQE.pack_into(self._sqes, place, _ASYNC_CANCEL, 0, 0, -1, 0, target, 0, 0, tag)
        self._tail += 1

    def enter(self, num_wanted: int, timeout_s: float = 1.0) -> None:
        """Submit the prepared entries; block until ``num_wanted`` completions are there or ``timeout_s`` have passed.

        Raises OSError for a bug of ours or the end of the ring; the errors of one submission are in its completion.
        """
        self._set_timeout(timeout_s)
        self._sq_tail.value = self._tail
        submitted = _system_call(
            _ENTER, self._fd, self._tail - self._num_submitted, num_wanted,
            _WAIT, self._wait_address, _GETEVENTS_ARG.size,
        )  # fmt: skip
        self._count_submitted(submitted)

    def enter_briefly(self) -> None:
        """Submit the prepared entries; never waits.

        Keeps the interpreter's lock: a thread that gives it up beside a busy Python thread is without it for 5 ms.
        Raises OSError as ``enter``.
        """
        self._sq_tail.value = self._tail
        num_pending = self._tail - self._num_submitted
        self._count_submitted(_brief_call(_ENTER, self._fd, num_pending, 0, _GETEVENTS, 0, 0))

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            _TIMESPEC.pack_into(self._timeout, 0, int(timeout_s), int(timeout_s % 1 * 1e9))

    def _find_submitted(self) -> None:
        # Order: a wait that ends early has submitted everything before; the kernel's head tells.
        self._num_submitted = self._tail - ((self._tail - self._sq_head.value) & 0xFFFFFFFF)

    def _count_submitted(self, submitted: int) -> None:
        if submitted >= 0:
            self._num_submitted += submitted
            return
        self._find_submitted()
        number = ctypes.get_errno()
        if number not in {errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY}:
            raise OSError(number, os.strerror(number))

    def completions(self) -> list[tuple[int, int, int]]:
        """Return the completions that are there, (tag, result, flags): bytes moved, or a negative errno."""
        tail = self._cq_tail.value
        if self._needs_fence:
            _system_call(_MEMBARRIER[platform.machine()], _PRIVATE_EXPEDITED, 0, 0, 0, 0, 0)
        head = self._head
        if head == tail:
            return []
        first, last = head & self._cq_mask, tail & self._cq_mask
        if first < last:
            found = list(_CQE.iter_unpack(self._cqes[first * _CQE.size : last * _CQE.size]))
        else:  # around the end
            found = list(_CQE.iter_unpack(self._cqes[first * _CQE.size :]))
            found += _CQE.iter_unpack(self._cqes[: last * _CQE.size])
        self._head = self._cq_head.value = tail
        return found

    def register_files(self, num_slots: int) -> None:
        """Make ``num_slots`` empty slots for ``set_file``."""
        empty = (ctypes.c_int * num_slots)(*[-1] * num_slots)
        self._register(_REGISTER_FILES, ctypes.addressof(empty), num_slots)

    def set_file(self, slot: int, fd: int) -> None:
        """Put the descriptor ``fd`` into ``slot``; the ring holds the file open by itself."""
        number = ctypes.c_int(fd)
        update = ctypes.create_string_buffer(struct.pack("=IIQ", slot, 0, ctypes.addressof(number)))
        self._register(_REGISTER_FILES_UPDATE, ctypes.addressof(update), 1)

    def close(self) -> None:
        """Unmap the rings and close the descriptor. Idempotent. Never call it with submissions in flight."""
        fd, self._fd = self._fd, -1
        mappings, self._mappings = self._mappings, []
        for address, nbytes in mappings:
            libc().munmap(address, nbytes)
        if fd >= 0:
            os.close(fd)

    def _register(self, opcode: int, address: int, num: int) -> None:
        if _system_call(_REGISTER, self._fd, opcode, address, num, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _map(self, params: Sequence[int]) -> None:
        num_sq, num_cq = params[0], params[1]
        sq, cq = params[10:18], params[19:27]
        rings = self._map_part(max(sq[6] + num_sq * 4, cq[5] + num_cq * _CQE.size), _OFFSET_RINGS)
        sqes = self._map_part(num_sq * _SQE_NBYTES, _OFFSET_SQES)
        word = ctypes.c_uint32.from_address
        self.num_entries = num_sq
        self._sq_head, self._sq_tail = word(rings + sq[0]), word(rings + sq[1])
        self._cq_head, self._cq_tail = word(rings + cq[0]), word(rings + cq[1])
        self._mask, self._cq_mask = word(rings + sq[2]).value, word(rings + cq[2]).value
        (ctypes.c_uint32 * num_sq).from_address(rings + sq[6])[:] = list(range(num_sq))  # entry i is submission i
        self._sqes = memoryview((ctypes.c_uint8 * (num_sq * _SQE_NBYTES)).from_address(sqes)).cast("B")
        self._entries = np.frombuffer(self._sqes, _SQE_DTYPE)
        self._cqes = memoryview((ctypes.c_uint8 * (num_cq * _CQE.size)).from_address(rings + cq[5])).cast("B")

    def _map_part(self, nbytes: int, offset: int) -> int:
        # Lifetime: not mmap.mmap, which keeps a second descriptor of the ring.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = libc().mmap(None, nbytes, protection, mmap.MAP_SHARED | _MAP_POPULATE, self._fd, offset)
        if address == MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._mappings.append((address, nbytes))
        advise(address, nbytes, DONTFORK)  # a forked child must not reach the parent's ring
        return int(address)


def _set_up(num_entries: int) -> tuple[str, int, tuple[int, ...]]:
    """Return the mode, the descriptor and the parameters of a new ring. Raises OSError, DeviceError."""
    if platform.machine() not in _MEMBARRIER:
        raise DeviceError(f"io_uring is used on {' and '.join(_MEMBARRIER)} only, and this is {platform.machine()}")
    for mode, flags in _MODES.items():
        for pause_s in _PAUSES_S:
            buffer = ctypes.create_string_buffer(_PARAMS.pack(0, 0, flags | _SETUP_CLAMP, *[0] * 25))
            fd = _system_call(_SETUP, num_entries, ctypes.addressof(buffer), 0, 0, 0, 0)
            number = ctypes.get_errno()
            if fd >= 0 or number != errno.ENOMEM:
                break
            time.sleep(pause_s)
        if fd >= 0:
            params = _PARAMS.unpack(buffer.raw[: _PARAMS.size])
            if params[5] & _NEEDED_FEATURES == _NEEDED_FEATURES:
                return mode, fd, params
            os.close(fd)
            raise DeviceError(f"io_uring of this kernel ({platform.release()}) is too old: it needs Linux 5.11")
        if number != errno.EINVAL:  # EINVAL: a flag this kernel does not know
            break
    raise OSError(number, os.strerror(number))
