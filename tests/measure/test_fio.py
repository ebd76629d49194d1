"""fio's side of a pair: the same blocks, huge pages lent and taken back, its report read."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import DeviceError
from tiered.measure import huge_pages as huge_pages_module
from tiered.measure.bed import Bed
from tiered.measure.fio import Fio, FioError, HugePages, open_file_path
from tiered.measure.pairs import BusyThread, measure_pairs
from tiered.measure.pattern import Pattern
from tiered.units import KiB, MiB

FILE = 4 * MiB
has_fio = shutil.which("fio") is not None


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Bed([tmp_path], engine="threads", memory_nbytes=4 * MiB, file_nbytes=FILE, depth=4) as bed:
        bed.write_file()
        yield bed
    assert not list(tmp_path.iterdir())


def pattern(op: str) -> Pattern:
    return Pattern(op, 256 * KiB, 4, FILE, seconds=5.0, max_nbytes=FILE)


class TestCommand:
    def test_the_jobs_are_ours(self) -> None:
        command = Fio("/bin/fio", "io_uring", has_huge_pages=True).command(pattern("mixed"), ["/file"], ["--limit"])
        jobs = [index for index, part in enumerate(command) if part.startswith("--name=")]
        assert len(jobs) == 2
        read, write = set(command[jobs[0] : jobs[1]]), set(command[jobs[1] :])
        assert read >= {"--rw=read", "--iodepth=2", "--offset=0", f"--size={FILE // 2}", "--filename=/file", "--limit"}
        assert write >= {"--rw=write", "--iodepth=2", f"--offset={FILE // 2}", f"--size={FILE // 2}", "--limit"}
        assert {"--direct=1", "--overwrite=1", "--randrepeat=0", "--iomem=mmaphuge"} < set(command[: jobs[0]])


class TestRuns:
    @pytest.mark.parametrize("op", ["write", "mixed"])
    def test_pairs_move_the_same_bytes(self, bed: Bed, op: str) -> None:
        """Where fio is missing the pairs have no other side, and say so."""
        fio = bed.find_fio()
        assert (fio is not None) == has_fio
        pairs = measure_pairs(bed, pattern(op), rounds=1, fio=fio, warm_up_s=0.01)
        assert len(pairs.ours) == 1
        assert len(pairs.fio) == (1 if has_fio else 0)
        assert (pairs.ratio_to_fio is not None) == (pairs.fio_gb_per_s is not None) == has_fio
        if op != "mixed":  # which ends when either direction has moved its half
            assert {one.nbytes for one in (*pairs.ours, *pairs.fio)} == {FILE}
        for one in pairs.fio:
            assert one.seconds > 0 <= one.cpu_s
            assert 0 < one.latency.p50_s <= one.latency.p99_s <= one.latency.p999_s
        assert (bed.device.files(), len(bed.paths)) == ({-1: FILE}, 1)

    @pytest.mark.parametrize("op", ["read", "write"])
    @pytest.mark.parametrize("is_busy", [False, True])
    def test_large_operations_move_the_same_blocks(self, tmp_path: Path, op: str, is_busy: bool) -> None:
        wanted = replace(pattern(op), block_nbytes=64 * KiB)
        with Bed([tmp_path], engine="uring", memory_nbytes=4 * MiB, file_nbytes=FILE, depth=4) as bed:
            bed.write_file()
            assert bed.can_run_large(wanted) and not bed.can_run_large(replace(wanted, op="mixed"))
            assert not bed.can_run_large(replace(wanted, block_nbytes=MiB))  # they would be blocks themselves
            pairs = measure_pairs(bed, wanted, rounds=2, has_large=True, is_busy=is_busy, warm_up_s=0.01)
            assert pairs.of_large is not None and pairs.of_large.of_large is None
            assert [one.nbytes for one in pairs.of_large.ours] == [one.nbytes for one in pairs.ours] == [FILE] * 2
            assert [len(one.latencies_s) for one in pairs.of_large.ours] == [2, 2]  # operations of 2 MiB
            assert pairs.of_large.gb_per_s > 0 and pairs.of_large.ratio_to_fio is None

    def test_threads_take_no_large_operations(self, bed: Bed) -> None:
        pairs = measure_pairs(bed, pattern("read"), rounds=1, has_large=True, warm_up_s=0.01)
        assert pairs.of_large is None and len(pairs.ours) == 1

    def test_a_busy_thread_is_not_counted_as_ours(self, bed: Bed) -> None:
        pairs = measure_pairs(bed, pattern("read"), rounds=1, is_busy=True, warm_up_s=0.01)
        (found,) = pairs.ours
        assert found.cpu_s < found.seconds * 4  # its own threads alone

    def test_a_program_that_is_no_fio_is_refused(self, bed: Bed) -> None:
        with pytest.raises(FioError, match="fio did not report: it said nothing"):
            Fio("/bin/true", "io_uring").run(pattern("read"), bed.paths)

    def test_a_file_that_is_not_open_has_no_path(self, tmp_path: Path) -> None:
        device = ThreadsDevice(tmp_path, num_threads=1)
        with pytest.raises(DeviceError, match=r"\(scratch\) is not open"):
            open_file_path(device)
        device.close()

    def test_files_that_look_alike_are_told_apart(self, tmp_path: Path) -> None:
        devices = [ThreadsDevice(tmp_path, num_threads=1) for _ in range(3)]
        for number, device in enumerate(devices):
            device.grow(SCRATCH, 4096)
            Path(open_file_path(device)).write_bytes(bytes([number]) * 4096)
        for number, device in enumerate(devices):
            assert Path(open_file_path(device)).read_bytes() == bytes([number]) * 4096
        for device in devices:
            device.close()

    def test_a_file_on_an_overlay_has_a_path(self, tmp_path: Path) -> None:
        """Whose files lie on another file system than its directories say."""
        for name in ("lower", "upper", "merged"):
            (tmp_path / name).mkdir()
        tmpfs = ["mount", "-t", "tmpfs", "none", str(tmp_path / "lower")]
        if os.geteuid() != 0 or subprocess.run(tmpfs, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")
        with ExitStack() as undo:
            undo.callback(subprocess.run, ["umount", tmp_path / "lower"], check=True)
            (tmp_path / "lower/run").mkdir()
            for name in ("upper/upper", "upper/work"):
                (tmp_path / name).mkdir()
            parts = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper/upper,workdir={tmp_path}/upper/work"
            command = ["mount", "-t", "overlay", "none", "-o", parts, str(tmp_path / "merged")]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("no overlay over these file systems")
            undo.callback(subprocess.run, ["umount", "--lazy", tmp_path / "merged"], check=True)
            place = tmp_path / "merged/run"
            with Bed([place], engine="threads", memory_nbytes=4 * MiB, file_nbytes=FILE, depth=4) as bed:
                bed.write_file()
                assert os.stat(bed.paths[0]).st_size == FILE


class TestHugePages:
    @pytest.fixture
    def fio(self) -> Fio:
        return Fio("/bin/fio", "io_uring")

    def test_the_setting_is_put_back(self, fio: Fio, tmp_path: Path) -> None:
        setting = tmp_path / "nr_hugepages"
        setting.write_text("3\n")
        with pytest.raises(RuntimeError), HugePages(pattern("read"), fio, setting=setting):
            assert fio.has_huge_pages
            assert int(setting.read_text()) == 3 + 1 + 2  # 1 MiB of blocks, and what alignment may take
            raise RuntimeError
        assert setting.read_text() == "3\n"
        assert not fio.has_huge_pages

    def test_a_signal_while_they_are_reserved_puts_them_back(self, fio: Fio, tmp_path: Path) -> None:
        class Struck(type(tmp_path)):  # type: ignore[misc]
            written: ClassVar[list[str]] = []

            def write_text(self, data: str, *arguments: object, **options: object) -> int:
                self.written.append(data)
                number = super().write_text(data, *arguments, **options)
                if len(self.written) == 1:
                    raise SystemExit(143)
                return int(number)

        setting = Struck(tmp_path / "nr_hugepages")
        (tmp_path / "nr_hugepages").write_text("3\n")
        with pytest.raises(SystemExit), HugePages(pattern("read"), fio, setting=setting):
            raise AssertionError("it was entered")
        assert setting.written == ["6\n", "3\n"] and setting.read_text() == "3\n"
        assert not fio.has_huge_pages

    def test_without_the_right_to_reserve_there_are_none(self, fio: Fio, tmp_path: Path) -> None:
        with HugePages(pattern("read"), fio, setting=tmp_path / "missing"):
            assert not fio.has_huge_pages
        assert not list(tmp_path.iterdir())

    def test_without_fio_nothing_is_reserved(self, tmp_path: Path) -> None:
        setting = tmp_path / "nr_hugepages"
        setting.write_text("3\n")
        with HugePages(pattern("read"), None, setting=setting):
            assert setting.read_text() == "3\n"

    def test_many_at_once_give_back_what_they_took(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huge_pages_module, "_LOCK_S", 300.0)  # after which one goes on without the lock
        setting = tmp_path / "nr_hugepages"
        setting.write_text("3\n")
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(self._borrow, setting) for _ in range(200)]:
                done.result()
        assert setting.read_text() == "3\n"

    def _borrow(self, setting: Path) -> None:
        fio = Fio("/bin/fio", "io_uring")
        with HugePages(pattern("read"), fio, setting=setting):
            assert fio.has_huge_pages

    def test_interrupted_while_it_holds_the_setting_it_still_gives_back(
        self, fio: Fio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = tmp_path / "nr_hugepages"
        setting.write_text("3\n")
        pages = HugePages(pattern("read"), fio, setting=setting)
        write_text = Path.write_text
        slept: list[float] = []

        def then_interrupt(path: Path, text: str) -> int:
            monkeypatch.undo()
            monkeypatch.setattr(time, "sleep", slept.append)
            monkeypatch.setattr(huge_pages_module, "_LOCK_S", 0.1)
            num_written = write_text(path, text)
            pages.restore()  # as a signal handler does
            raise SystemExit(num_written)

        monkeypatch.setattr(Path, "write_text", then_interrupt)
        with pytest.raises(SystemExit), pages:
            pass
        assert setting.read_text() == "3\n"
        assert not slept, "it waited for itself"


def test_a_busy_thread_burns_time_until_it_is_told_to_stop() -> None:
    with BusyThread() as busy:
        while busy.cpu_seconds() < 0.01:
            pass
