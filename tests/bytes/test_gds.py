"""GPUDirect Storage: routing, errors and durability, with files that move bytes of tensors in DRAM; kvikio if here."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bytes.moving import Batch, exit_code_of_child, fill, move
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.gds import GdsDevice
from tiered.bytes.device.striped import StripedDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import ClosedError, DeviceError, UsageError
from tiered.units import KiB, MiB


class HostFile:
    """Moves bytes of tensors in DRAM, at most ``most`` at a time."""

    most = 24 * KiB

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        return os.preadv(self._fd, [buf[: min(size, self.most)].numpy().data], file_offset)

    def write(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        return os.pwritev(self._fd, [buf[: min(size, self.most)].numpy().data], file_offset)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def opened(directory: Path, open_file: Callable[[str], HostFile] = HostFile) -> GdsDevice:
    device = GdsDevice(ThreadsDevice(directory, num_threads=1), num_threads=2, open_file=open_file)
    device.grow(0, 1 * MiB)
    return device


def submit(device: GdsDevice | StripedDevice, verb: str, memory: memoryview, offset: int = 0, file: int = 0) -> object:
    batch = Batch(device)
    device.submit([batch.operation(verb, memory, offset, file=file)])
    (done,) = batch.wait(1)
    return done.error


def test_tensors_and_ordinary_memory_meet_in_the_same_file(tmp_path: Path, buffer: Buffer) -> None:
    device = opened(tmp_path)
    tensor = torch.arange(16 * KiB, dtype=torch.float32)
    view = device.view(tensor)
    assert len(view) == 64 * KiB
    assert submit(device, "write", view) is None
    device.flush()
    assert move(device, "read", buffer) is None
    assert bytes(buffer.memory) == tensor.numpy().tobytes()
    content = fill(buffer, 3)
    assert move(device, "write", buffer, 64 * KiB) is None
    assert submit(device, "read", view[4096:12288], 64 * KiB) is None  # a slice of a view is one too
    assert tensor.numpy().tobytes()[4096:12288] == content[:8192]
    counted = device.statistics()
    assert (counted.num_writes, counted.write_bytes) == (2, 128 * KiB)
    assert (counted.num_reads, counted.read_bytes, counted.num_in_flight) == (2, 72 * KiB, 0)
    device.forget(tensor)
    device.close()


def test_adaptors_above_may_split_a_view(tmp_path: Path) -> None:
    below = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        below.append(GdsDevice(ThreadsDevice(tmp_path / name, num_threads=1), open_file=HostFile))
    device = StripedDevice(below, stripe_nbytes=8 * KiB)
    device.grow(0, 64 * KiB)
    tensor = torch.randint(0, 256, (64 * KiB,), dtype=torch.uint8)
    expected = tensor.clone()
    views = [each.view(tensor) for each in below]
    assert submit(device, "write", views[0]) is None
    tensor.zero_()
    assert submit(device, "read", views[0]) is None
    assert torch.equal(tensor, expected)
    assert [each.statistics().write_bytes for each in below] == [32 * KiB, 32 * KiB]
    device.close()


def test_what_cannot_be_moved_is_a_device_error(tmp_path: Path) -> None:
    class Broken(HostFile):
        def read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
            if file_offset:
                raise RuntimeError("cuFile: invalid")
            return 0

    device = opened(tmp_path, Broken)
    device.grow(SCRATCH, 64 * KiB)
    view = device.view(torch.zeros(4096, dtype=torch.uint8))
    for offset, file, what in ((0, 0, "stopped after 0"), (4096, 0, "cuFile"), (1 * MiB, 0, "has 1048576 bytes"),
                               (0, 7, "has 0 bytes"), (0, SCRATCH, "no name")):  # fmt: skip
        error = submit(device, "read", view, offset, file)
        assert isinstance(error, DeviceError) and what in str(error) and device.path(file) in str(error)
    assert device.statistics().num_reads == 0
    device.close()
    with pytest.raises(ClosedError):
        device.submit([Batch(device).operation("read", view, 0)])


def test_a_flush_that_fails_is_never_tried_again(tmp_path: Path) -> None:
    class Unflushable(HostFile):
        def fileno(self) -> int:
            return 1 << 20  # no descriptor: EBADF

    device = opened(tmp_path, Unflushable)
    assert submit(device, "write", device.view(torch.zeros(4096, dtype=torch.uint8))) is None
    for _ in range(2):
        with pytest.raises(DeviceError, match="flush of"):
            device.flush()
    device.close()


def test_after_an_interrupted_flush_the_next_one_has_it_all_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    synced: list[str] = []
    fdatasync = os.fdatasync
    device = opened(tmp_path)
    device.flush()
    assert submit(device, "write", device.view(torch.zeros(4096, dtype=torch.uint8))) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fdatasync(fd)))
    device.flush()
    assert synced == [device.path(0)]
    device.close()


def test_close_completes_what_is_in_flight_and_leaves_no_thread(tmp_path: Path) -> None:
    device = opened(tmp_path)
    view = device.view(torch.zeros(64 * KiB, dtype=torch.uint8))
    batch = Batch(device)
    device.submit([batch.operation("write", view, i * 64 * KiB) for i in range(16)])
    device.close()
    device.close()
    assert [done.error for done in batch.wait(16)] == [None] * 16
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiered-gds")]


def test_views_are_of_contiguous_tensors_with_bytes(tmp_path: Path) -> None:
    device = opened(tmp_path)
    for tensor in (torch.zeros(4, 4).t()[1:], torch.zeros(0)):
        with pytest.raises(ValueError, match="contiguous"):
            device.view(tensor)
    device.close()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    device = opened(tmp_path)
    view = device.view(torch.zeros(4096, dtype=torch.uint8))

    def check() -> None:
        with pytest.raises(UsageError, match="fork"):
            device.submit([Batch(device).operation("read", view, 0)])
        device.close()

    assert exit_code_of_child(check) == 0
    device.close()


def test_without_kvikio_the_way_to_get_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvikio", None)
    upstream = ThreadsDevice(tmp_path, num_threads=1)
    with pytest.raises(UsageError, match=r"tiered\[gds\]"):
        GdsDevice(upstream)
    upstream.close()


def test_bytes_go_straight_to_the_compute_device(tmp_path: Path) -> None:
    pytest.importorskip("kvikio", reason="GPUDirect Storage takes kvikio: pip install 'tiered[gds]'")
    if not torch.cuda.is_available():
        pytest.skip("GPUDirect Storage takes a CUDA device")
    device = GdsDevice(ThreadsDevice(tmp_path, num_threads=1))
    device.grow(0, 16 * MiB)
    tensor = torch.randint(0, 256, (16 * MiB,), dtype=torch.uint8, device="cuda")
    expected = tensor.clone()
    view = device.view(tensor)
    torch.cuda.synchronize()
    assert submit(device, "write", view) is None
    tensor.zero_()
    torch.cuda.synchronize()
    assert submit(device, "read", view) is None
    assert torch.equal(tensor, expected)
    device.flush()
    device.close()
