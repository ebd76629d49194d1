"""Files of the user's own: a read that fails, and a file system without direct I/O."""

import concurrent.futures.thread
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered.bytes.file_stream import PIECE_NBYTES, FileMemory, FileReader, FileWriter
from tiered.errors import DeviceError


def test_nothing_is_written_to_the_callers_memory_after_a_read_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first piece fails while the others are still read."""
    (tmp_path / "file").write_bytes(b"\1" * (8 * PIECE_NBYTES))
    has_failed, real, reads = threading.Event(), os.preadv, []

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not offset:
            has_failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        has_failed.wait()
        reads.append(offset)
        return real(fd, buffers, offset)

    reader = FileReader(str(tmp_path / "file"))
    memory = bytearray(8 * PIECE_NBYTES)
    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(DeviceError, match="Input/output error"):
        reader.begin(0, memoryview(memory))()
    left, number = bytes(memory[::PIECE_NBYTES]), len(reads)
    reader.close()  # waits for whatever is on its way
    assert bytes(memory[::PIECE_NBYTES]) == left and len(reads) == number


def test_a_kernel_that_makes_the_file_before_it_refuses_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(os, "open", refusing)
    with FileWriter(str(tmp_path / "file"), 5) as file:
        file.write(memoryview(b"tiers"))
        file.finish()
    assert (tmp_path / "file").read_bytes() == b"tiers"
    with pytest.raises(DeviceError, match="exists"):
        FileWriter(str(tmp_path / "file"), 5)


def test_the_callers_memory_is_let_go_when_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool keeps what a thread was given for a moment after the result: on a busy machine a lease lingered."""
    (tmp_path / "file").write_bytes(b"\1" * 10_000)
    looked, run = threading.Event(), concurrent.futures.thread._WorkItem.run

    def run_and_stay(item: Any, *args: Any) -> None:
        run(item, *args)
        looked.wait(10)

    monkeypatch.setattr(concurrent.futures.thread._WorkItem, "run", run_and_stay)
    reader, memory = FileReader(str(tmp_path / "file")), bytearray(10_000)
    reader.begin(0, memoryview(memory))()
    memory.append(1)  # raises BufferError while somebody has a view of it
    looked.set()
    reader.close()


def test_a_copy_that_cannot_be_written_is_an_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    memory = FileMemory(str(tmp_path), [4096])
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(DeviceError, match="cannot write byte 0 of a copy's file"):
        memory.copy(torch.ones(8))
    memory.close()
