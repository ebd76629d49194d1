"""fio's side of a pair: the same blocks, huge pages lent and taken back, its report read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

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

    def test_a_busy_thread_is_not_counted_as_ours(self, bed: Bed) -> None:
        pairs = measure_pairs(bed, pattern("read"), rounds=1, is_busy=True, warm_up_s=0.01)
        (found,) = pairs.ours
        assert found.cpu_s < found.seconds * 4  # its own threads alone

    def test_a_program_that_is_no_fio_is_refused(self, bed: Bed) -> None:
        with pytest.raises(FioError, match="fio did not report: it said nothing"):
            Fio("/bin/true", "io_uring").run(pattern("read"), bed.paths)

    def test_a_file_that_is_not_open_has_no_path(self, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="no unnamed file of 4096 bytes"):
            open_file_path(tmp_path, 4096)


class TestHugePages:
    def test_the_setting_is_put_back(self, tmp_path: Path) -> None:
        setting = tmp_path / "nr_hugepages"
        setting.write_text("3\n")
        with pytest.raises(RuntimeError), HugePages(pattern("read"), setting=setting) as pages:
            assert pages.are_there
            assert int(setting.read_text()) == 3 + 1 + 2  # 1 MiB of blocks, and what alignment may take
            raise RuntimeError
        assert setting.read_text() == "3\n"

    def test_without_the_right_to_reserve_there_are_none(self, tmp_path: Path) -> None:
        with HugePages(pattern("read"), setting=tmp_path / "missing") as pages:
            assert not pages.are_there
        assert not list(tmp_path.iterdir())


def test_a_busy_thread_burns_time_until_it_is_told_to_stop() -> None:
    with BusyThread() as busy:
        while busy.cpu_seconds() < 0.01:
            pass
