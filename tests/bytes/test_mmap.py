"""The mmap engine: files that are cut off under it, kernels that refuse its way of reading, ranges of any size."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bytes.moving import Batch, exit_code_of_child, fill, move
from tests.seccomp import forbid
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.threads import _MADV_POPULATE_READ, MmapDevice, _copy
from tiered.errors import DeviceError, UsageError
from tiered.units import KiB, MiB


@pytest.fixture
def device(tmp_path: Path) -> Iterator[MmapDevice]:
    device = MmapDevice(tmp_path, num_threads=2)
    device.grow(0, 256 * KiB)
    yield device
    device.close()


@pytest.mark.parametrize("nbytes", [0, 4096, 40 * KiB, 100 * KiB + 7])
def test_a_file_that_was_cut_off_is_an_error(device: MmapDevice, tmp_path: Path, buffer: Buffer, nbytes: int) -> None:
    content = fill(buffer, 1)
    for offset in range(0, 256 * KiB, buffer.nbytes):
        assert move(device, "write", buffer, offset) is None
    os.truncate(tmp_path / "data-000", nbytes)
    for offset in range(0, 256 * KiB, buffer.nbytes):
        error = move(device, "read", buffer, offset)
        if offset + buffer.nbytes <= nbytes:
            assert error is None and bytes(buffer.memory) == content
        else:
            assert isinstance(error, DeviceError) and f"offset {offset}" in str(error)
            assert f"stopped after {max(0, nbytes - offset)} bytes" in str(error)


@pytest.mark.parametrize("left", [0, 8192])
def test_a_file_that_is_cut_off_while_it_is_copied_is_no_crash(tmp_path: Path, buffer: Buffer, left: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * buffer.nbytes)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), buffer.nbytes, prot=mmap.PROT_READ) as window:
        window.madvise(_MADV_POPULATE_READ)
        os.truncate(path, left)
        if left:
            assert _copy(window, 0, buffer.memory) == left
        with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
            _copy(window, left, buffer.memory[: buffer.nbytes - left])


def test_reads_larger_than_a_window_go_on_in_the_next(tmp_path: Path) -> None:
    arena = Arena(40 * MiB)
    buffer = arena.allocate_nowait(33 * MiB + 4096)
    assert buffer is not None
    device = MmapDevice(tmp_path)
    device.grow(0, 36 * MiB)
    content = os.urandom(1 * MiB + 1) * 34
    buffer.memory[:] = content[: buffer.nbytes]
    assert move(device, "write", buffer, 4096) is None
    buffer.memory[:] = bytes(buffer.nbytes)
    assert move(device, "read", buffer, 4096) is None
    assert bytes(buffer.memory) == content[: buffer.nbytes]
    device.close()
    arena.release(buffer)
    arena.close()


@pytest.mark.parametrize("call", ["process_vm_readv", "madvise"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_where_the_kernel_refuses_preadv_reads_and_one_warning_says_so(
    tmp_path: Path, call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        forbid([call], number)
        device = MmapDevice(tmp_path, num_threads=1)
        device.grow(0, 64 * KiB)
        with mmap.mmap(-1, 64 * KiB) as pages, memoryview(pages) as memory:
            content = pages[:] = os.urandom(64 * KiB)
            batch = Batch(device)
            for verb in ("write", "read", "read"):
                device.submit([batch.operation(verb, memory, 0)])
                assert batch.wait(1)[0].error is None
                if verb == "write":
                    memory[:] = bytes(64 * KiB)
                assert verb == "write" or memory == content
            device.close()
        assert len(caplog.records) == 1 and "preadv" in caplog.text and str(tmp_path) in caplog.text

    assert exit_code_of_child(check) == 0


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENODEV, errno.EACCES])
def test_what_cannot_be_mapped_preadv_reads(
    device: MmapDevice, buffer: Buffer, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    content = fill(buffer, 5)
    assert move(device, "write", buffer) is None
    buffer.memory[:] = bytes(buffer.nbytes)
    monkeypatch.setattr(mmap, "mmap", refused)
    assert move(device, "read", buffer) is None
    assert bytes(buffer.memory) == content


def test_direct_io_is_for_other_engines(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="page cache"):
        MmapDevice(tmp_path, direct=True)


def test_nothing_stays_mapped_between_reads(device: MmapDevice, buffer: Buffer) -> None:
    assert move(device, "write", buffer) is None and move(device, "read", buffer) is None
    assert device.path(0) not in Path("/proc/self/maps").read_text()
