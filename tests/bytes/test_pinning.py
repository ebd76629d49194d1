"""Memory that a kernel has the address of: what may be written to and what not."""

import ctypes
import mmap
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.bytes.faulty import faulty
from tests.bytes.moving import Batch, fill
from tiered.bytes.arena import Buffer
from tiered.bytes.device.uring import address_of, pin
from tiered.errors import DeviceError


def test_what_is_pinned_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 4096)
    with open(tmp_path / "file", "r+b") as file:
        for access in (mmap.ACCESS_WRITE, mmap.ACCESS_READ):
            pages = mmap.mmap(file.fileno(), 4096, access=access)
            memory = memoryview(pages)
            with pytest.raises(TypeError) if memory.readonly else nullcontext():
                pin(memory)
            pinned = pin(memory, is_read_only=True)
            memory.release()
            with pytest.raises(BufferError):
                pages.close()
            assert ctypes.string_at(address_of(pinned), 4096) == b"x" * 4096
            with pytest.raises(ValueError, match="released"):
                pin(memory, is_read_only=True)
            del pinned
            pages.close()


def test_a_read_into_memory_that_may_not_be_written_to_fails(tmp_path: Path, buffer: Buffer) -> None:
    content = fill(buffer, 7)
    with faulty(tmp_path, "uring") as device:
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory.toreadonly(), 0)])
        assert isinstance(batch.wait(1)[0].error, DeviceError) and bytes(buffer.memory) == content
