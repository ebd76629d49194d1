"""A device over the user's own files: read in place by every engine, never written, and asked whether they changed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.bytes.faulty import ENGINES, Errors, Gate
from tests.bytes.moving import WAIT_S, Batch, exit_code_of_child, move
from tests.bytes.places import PLACES
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device import engines, uring
from tiered.bytes.device.base import IOClass
from tiered.bytes.device.engines import DEVICES, open_external
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.errors import ClosedError, DeviceError, UsageError
from tiered.units import KiB, round_up

PAGE = 4096


@pytest.fixture(params=DEVICES)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def made(path: Path, nbytes: int, seed: int = 0) -> bytes:
    """Make a file of ``nbytes`` that differ from place to place, as long ago as a model that somebody has."""
    content = b"".join((seed << 32 | number).to_bytes(8, "little") for number in range(nbytes // 8 + 1))[:nbytes]
    path.write_bytes(content)
    os.utime(path, (1.7e9, 1.7e9))  # so that a later write shows in any kernel's time
    return content


def read(device: FileDevice, buffer: Buffer, offset: int, nbytes: int, *, file: int = 0) -> bytes | Exception:
    """Return ``nbytes`` at ``offset``, read over other bytes, or the error."""
    buffer.memory[:] = b"?" * buffer.nbytes
    batch = Batch(device)
    device.submit([batch.operation("read", buffer.memory[:nbytes], offset, file=file)])
    error = batch.wait(1)[0].error
    assert bytes(buffer.memory[nbytes:]) == b"?" * (buffer.nbytes - nbytes)
    return error or bytes(buffer.memory[:nbytes])


def test_files_of_several_directories_are_read_in_the_order_given(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    sizes = {"b/2": 3 * PAGE, "a/1": PAGE + 1, "a/3": 100}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    contents = [made(tmp_path / name, nbytes, seed) for seed, (name, nbytes) in enumerate(sizes.items())]
    with closing(open_external([tmp_path / name for name in sizes], engine)) as device:
        assert device.engine == engine and device.name == f"{tmp_path}/b/2 and 2 more"
        assert device.files() == {0: 3 * PAGE, 1: 2 * PAGE, 2: PAGE}
        assert [device.external.nbytes(file) for file in range(3)] == list(sizes.values())
        for file, (name, content) in enumerate(zip(sizes, contents, strict=True)):
            assert device.path(file) == str(tmp_path / name)
            nbytes = device.files()[file]
            assert read(device, buffer, 0, nbytes, file=file) == content.ljust(nbytes, b"\0")
        statistics = device.statistics()
        assert statistics.read_bytes == sum(sizes.values()) and statistics.num_reads == 3
        device.flush()
        assert device.free_bytes() == 0 and device.external.changed() is None
    device.close()


@pytest.mark.parametrize(("name", "direct"), [*((name, None) for name in ENGINES), ("threads", False)])
def test_behind_the_end_there_are_zeros(tmp_path: Path, name: str, direct: bool | None, buffer: Buffer) -> None:
    for nbytes in (1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 511):
        content = made(tmp_path / "file", nbytes)
        end = round_up(nbytes, PAGE)
        with closing(ENGINES[name]([tmp_path / "file"], direct=direct)) as device:
            for offset in range(0, end, PAGE):
                for length in (PAGE, 2 * PAGE, 12 * PAGE):
                    expected = content[offset : offset + length].ljust(length, b"\0")
                    assert read(device, buffer, offset, length) == expected
            for offset in (end, end + 3 * PAGE, -PAGE):
                error = read(device, buffer, offset, PAGE)
                assert isinstance(error, DeviceError)
                assert f"offset {offset} of {tmp_path}/file failed: the file has {nbytes} bytes" in str(error)


def test_a_short_read_before_the_end_goes_on(tmp_path: Path, buffer: Buffer) -> None:
    content = made(tmp_path / "file", 6 * PAGE + 100)
    for name in ("threads", "aiofiles", "uring", "uring-cut", "mmap"):
        with closing(ENGINES[name]([tmp_path / "file"])) as device:
            device.fault = lambda call, fd, memory, offset: call(fd, memory[:PAGE], offset)
            assert read(device, buffer, 0, 7 * PAGE) == content.ljust(7 * PAGE, b"\0")
            device.fault = Errors(errno.EIO, errno.EIO)
            assert read(device, buffer, 6 * PAGE, PAGE) == content[6 * PAGE :].ljust(PAGE, b"\0")


def test_reads_behind_a_short_one_are_complete(tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a large batch waits for the other half, and io_uring cancels what waits for a read that ends short."""
    content = made(tmp_path / "file", PAGE + 5)
    monkeypatch.setattr(uring, "_CHAINED_NBYTES", 2 * PAGE)
    with closing(UringDevice([tmp_path / "file"])) as device:
        batch = Batch(device)
        places = [buffer.memory[start : start + PAGE] for start in range(0, buffer.nbytes, PAGE)]
        device.submit([batch.operation("read", place, PAGE, io_class=IOClass.PREFETCH) for place in places])
        assert [operation.error for operation in batch.wait(len(places))] == [None] * len(places)
        assert all(place == content[PAGE:].ljust(PAGE, b"\0") for place in places)


def test_a_file_that_was_cut_off_is_an_error_and_no_zeros(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    made(tmp_path / "file", 8 * PAGE)
    with closing(open_external([tmp_path / "file"], engine)) as device:
        os.truncate(tmp_path / "file", 3 * PAGE + 10)
        error = read(device, buffer, 0, 8 * PAGE)
        assert isinstance(error, DeviceError) and f"{tmp_path}/file" in str(error) and "stopped" in str(error)


def test_bytes_that_were_appended_stay_outside(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    content = made(tmp_path / "file", PAGE + 10)
    with closing(open_external([tmp_path / "file"], engine)) as device:
        with open(tmp_path / "file", "ab") as file:
            file.write(b"appended" * PAGE)
        assert read(device, buffer, 0, 3 * PAGE) == content.ljust(3 * PAGE, b"\0")
        assert isinstance(read(device, buffer, 2 * PAGE, PAGE), DeviceError)


def test_nothing_is_written(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    content = made(tmp_path / "file", PAGE)
    with closing(open_external([tmp_path / "file"], engine)) as device:
        batch = Batch(device)
        reading = batch.operation("read", buffer.memory[:PAGE], 0)
        writing = batch.operation("write", buffer.memory[:PAGE], 0)
        with pytest.raises(UsageError, match="only read"):
            device.submit([reading, writing])
        with pytest.raises(UsageError, match=r"file cannot grow to 8192 bytes: external files are only read"):
            device.grow(0, 2 * PAGE)
        assert batch.done.empty() and device.statistics().num_in_flight == 0
        flags = fcntl.fcntl(device.descriptor(0), fcntl.F_GETFL)
        assert flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_NONBLOCK
    assert (tmp_path / "file").read_bytes() == content


def test_a_read_only_directory_is_left_as_it_was(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    content = made(tmp_path / "file", PAGE)
    (tmp_path / "file").chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        before = os.listdir(tmp_path), os.stat(tmp_path).st_mtime_ns, os.stat(tmp_path).st_ctime_ns
        with closing(open_external([tmp_path / "file"], engine)) as device:
            assert read(device, buffer, 0, PAGE) == content
        with closing(open_external([tmp_path / "file"])):
            pass
        assert before == (os.listdir(tmp_path), os.stat(tmp_path).st_mtime_ns, os.stat(tmp_path).st_ctime_ns)
    finally:
        tmp_path.chmod(0o755)


def test_links_are_followed_and_paths_are_absolute(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blobs").mkdir()
    content = made(tmp_path / "blobs/0f3a", 1000)
    (tmp_path / "model.safetensors").symlink_to("blobs/0f3a")
    monkeypatch.chdir(tmp_path)
    with closing(open_external(["model.safetensors"])) as device:
        monkeypatch.chdir("/")
        assert device.path(0) == f"{tmp_path}/model.safetensors" and device.external.changed() is None
        assert read(device, buffer, 0, PAGE) == content.ljust(PAGE, b"\0")
        made(tmp_path / "blobs/77", 1000)
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors").symlink_to("blobs/77")
        assert "another file has been put in its place" in str(device.external.changed())


def rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"other")


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def rename_over(path: Path) -> None:
    made(path.with_suffix(".new"), path.stat().st_size)
    path.with_suffix(".new").rename(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, 10), "nbytes was 5000 and is 10"),
    "appended to": (append, "nbytes was 5000 and is 5004"),
    "rewritten in place": (rewrite, "mtime_ns was 1700000000000000000 and is"),
    "another": (rename_over, "ctime_ns was|another file has been put in its place"),
    "gone": (os.unlink, "ctime_ns was"),
    "under a directory that has another name": (lambda path: path.parent.rename(path.parent.parent / "b"), "nowhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told(tmp_path: Path, change: str) -> None:
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "a/0", tmp_path / "a/1"]
    for path in paths:
        made(path, 5000)
    act, message = CHANGES[change]
    with closing(open_external(paths, "threads")) as device:
        assert device.external.changed() is None
        act(paths[1])
        with pytest.raises(AssertionError, match=message):
            assert not device.external.changed(1), device.external.changed(1)
        assert str(paths[1]) in str(device.external.changed(1))
        if change != "under a directory that has another name":
            assert device.external.changed(0) is None and device.external.changed() == device.external.changed(1)
    with pytest.raises(ClosedError):
        device.external.changed()


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def behind_a_file(path: Path) -> None:
    path.parent.rmdir()
    made(path.parent, 10)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "is missing: get it again"),
    "a link to nothing": (link_to_nothing, "is a link to a file that is missing: get it again"),
    "a loop of links": (loop, "cannot be opened: .*; check the path"),
    "behind a file": (behind_a_file, "cannot be opened: Not a directory; check the path"),
    "a directory": (os.mkdir, "is a directory: name the files in it"),
    "a FIFO": (os.mkfifo, "is no regular file"),
    "empty": (lambda path: made(path, 0), "is empty: get it again, or leave it out"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_path_that_the_caller_has_to_mend_is_named(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a/file"
    good = tmp_path / "good"
    made(good, 10)
    act, message = WRONG[wrong]
    act(path)
    for engine in ("auto", "threads", "uring"):
        for paths in ([path], [good, path]):
            with pytest.raises(UsageError, match=f"{path} {message}"):
                open_external(paths, engine)


def test_what_is_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no external file was given"):
        open_external([])
    with pytest.raises(UsageError, match="no external file was given"):
        ThreadsDevice([])
    with pytest.raises(TypeError, match=r"got the one path '/a': give \['/a'\]"):
        open_external("/a")
    with pytest.raises(UsageError, match="is no path"):
        open_external([tmp_path / "a\0b"])
    made(tmp_path / "file", 10)
    with pytest.raises(UsageError, match="engine='tape' is unknown"):
        open_external([tmp_path / "file"], "tape")
    with closing(ThreadsDevice(tmp_path)) as device, pytest.raises(UsageError, match="a directory of data files"):
        _ = device.external


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    made(tmp_path / "file", 10)
    (tmp_path / "file").chmod(0)

    def check() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(UsageError, match=r"cannot be read: Permission denied; let this user read it"):
            open_external([tmp_path / "file"])

    assert exit_code_of_child(check) == 0


def test_a_full_table_of_descriptors_is_no_fault_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "file", 10)

    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeviceError, match=r"cannot open .*file: Too many open files; raise the limit"):
        ThreadsDevice([tmp_path / "file"])


@contextlib.contextmanager
def no_direct_open(monkeypatch: pytest.MonkeyPatch, under: Path) -> Iterator[None]:
    """Refuse O_DIRECT under one directory, as a file system without it does."""
    opened = os.open

    def open_without(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_DIRECT and str(path).startswith(str(under)):
            raise OSError(errno.EINVAL, "scripted")
        return opened(path, flags, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_without)
        yield


def test_direct_io_is_chosen_file_by_file_with_one_warning_for_a_directory(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / name for name in ("direct/0", "buffered/1", "buffered/2")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
    contents = [made(path, 2 * PAGE + 7, seed) for seed, path in enumerate(paths)]
    with closing(ThreadsDevice(paths[:1])) as device:
        is_direct = device.is_direct
    caplog.clear()
    with no_direct_open(monkeypatch, tmp_path / "buffered"), caplog.at_level(logging.WARNING, "tiered"):
        with closing(ThreadsDevice(paths)) as device:
            for file, content in enumerate(contents):
                assert read(device, buffer, 0, 3 * PAGE, file=file) == content.ljust(3 * PAGE, b"\0")
            flags = [fcntl.fcntl(device.descriptor(file), fcntl.F_GETFL) & os.O_DIRECT for file in range(3)]
            assert [bool(flag) for flag in flags] == [is_direct, False, False] and device.is_direct == is_direct
        with pytest.raises(DeviceError, match=r"buffered has no direct I/O: .*; give direct=None"):
            ThreadsDevice(paths, direct=True)
    if is_direct:
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path}/buffered: I/O is buffered, slower and takes page cache, because direct I/O does not work "
            "there: the file system refuses to open files with O_DIRECT"
        ]
    caplog.clear()
    with closing(ThreadsDevice(paths, direct=False)) as device:
        assert not device.is_direct and not caplog.records


@pytest.mark.parametrize("number", [0, errno.EINVAL, errno.EBADMSG])
def test_a_trial_read_that_fails_leaves_buffered_io_or_is_an_error(
    tmp_path: Path, number: int, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    content = made(tmp_path / "file", PAGE)
    with closing(ThreadsDevice([tmp_path / "file"])) as device:
        if not device.is_direct:
            pytest.skip("no direct I/O here")

    class FailsFirst(ThreadsDevice):
        num_calls = 0

        def _pread(self, fd: int, memory: memoryview, offset: int) -> int:
            self.num_calls += 1
            if self.num_calls == 1 and number:
                raise OSError(number, "scripted")
            return 100 if self.num_calls == 1 else super()._pread(fd, memory, offset)

    with caplog.at_level(logging.WARNING, "tiered"):
        if number == errno.EBADMSG:
            with pytest.raises(DeviceError, match=f"cannot read {tmp_path}/file: scripted"):
                FailsFirst([tmp_path / "file"])
            return
        with closing(FailsFirst([tmp_path / "file"])) as device:
            assert not device.is_direct and read(device, buffer, 0, PAGE) == content
    assert ("a trial read failed: scripted" if number else "a trial read gave 100 bytes of 4096") in caplog.text


@pytest.mark.parametrize("place", [place for place in PLACES if place != "plain"])
def test_files_of_another_file_system_are_read(tmp_path: Path, place: str, buffer: Buffer) -> None:
    (tmp_path / "there").mkdir()
    with PLACES[place](tmp_path / "there") as there:
        contents = [made(tmp_path / "file", PAGE + 1, 1), made(there / "file", 2 * PAGE + 2, 2)]
        for engine in DEVICES:
            with closing(open_external([tmp_path / "file", there / "file"], engine)) as device:
                for file, content in enumerate(contents):
                    assert read(device, buffer, 0, 4 * PAGE, file=file) == content.ljust(4 * PAGE, b"\0")
                assert device.external.changed() is None


def test_where_io_uring_is_refused_threads_read(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = made(tmp_path / "file", PAGE)
    monkeypatch.setattr(engines, "_said", set())
    monkeypatch.setattr(engines, "probe_uring_read", lambda path, fd, deadline_s: "scripted")
    with caplog.at_level(logging.WARNING, "tiered"), closing(open_external([tmp_path / "file"])) as device:
        assert device.engine == "threads" and read(device, buffer, 0, PAGE) == content
    assert "engine 'threads' instead of io_uring: scripted" in caplog.text
    with pytest.raises(DeviceError, match=f'{tmp_path}/file: engine="uring" does not work: scripted'):
        open_external([tmp_path / "file"], "uring")


def test_a_ring_has_room_for_hundreds_of_files(tmp_path: Path, buffer: Buffer) -> None:
    paths = [tmp_path / str(number) for number in range(300)]
    for number, path in enumerate(paths):
        path.write_bytes(b"%d" % number)
    with closing(UringDevice(paths)) as device:
        for number in range(300):
            assert read(device, buffer, 0, PAGE, file=number) == (b"%d" % number).ljust(PAGE, b"\0")
        assert isinstance(read(device, buffer, 0, PAGE, file=300), DeviceError)


def test_close_completes_the_reads_in_flight(tmp_path: Path, arena: Arena) -> None:
    content = made(tmp_path / "file", 8 * PAGE + 9)
    for name in ENGINES:
        device = ENGINES[name]([tmp_path / "file"], deadline_s=WAIT_S)
        gate = device.fault = Gate()
        buffers = [arena.allocate_nowait(PAGE) for _ in range(9)]
        batch = Batch(device)
        device.submit(
            [batch.operation("read", buffer.memory, i * PAGE) for i, buffer in enumerate(buffers) if buffer is not None]
        )
        assert gate.reached.acquire(timeout=WAIT_S)
        gate.opened.set()
        device.close()
        assert [operation.error for operation in batch.wait(9)] == [None] * 9
        assert b"".join(bytes(buffer.memory) for buffer in buffers if buffer) == content.ljust(9 * PAGE, b"\0")
        for buffer in buffers:
            assert buffer is not None
            arena.release(buffer)
        with pytest.raises(ClosedError):
            device.submit([])
        with pytest.raises(ClosedError):
            _ = device.external


def test_a_forked_child_holds_nothing_and_is_refused(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    made(tmp_path / "file", 64 * KiB)
    with closing(open_external([tmp_path / "file"], engine)) as device:
        external = device.external

        def check() -> None:
            held = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{fd}")
            ]
            assert str(tmp_path / "file") not in held
            uses = [lambda: device.external, device.files, lambda: move(device, "read", buffer)]
            for use in uses:
                with pytest.raises(UsageError, match="fork"):
                    use()
            with pytest.raises(ClosedError):
                external.changed()
            device.close()

        assert exit_code_of_child(check) == 0
        assert move(device, "read", buffer) is None and external.changed() is None
