"""fio's side of a pair: the same blocks, huge pages for its memory, its report read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import DeviceError
from tiered.tools.bench.rounds import Pattern
from tiered.tools.bench.scratch_file import Fio, FioError, ScratchFile, open_file_path
from tiered.tools.bench.suite import measure_pairs, row_of
from tiered.units import KiB, MiB

FILE = 4 * MiB
has_fio = shutil.which("fio") is not None


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFile]:
    with ScratchFile(tmp_path, engine="threads", memory_nbytes=4 * MiB, file_nbytes=FILE, depth=4) as scratch:
        scratch.write_file()
        yield scratch
    assert not list(tmp_path.iterdir())


def pattern(op: str) -> Pattern:
    return Pattern(op, 256 * KiB, 4, FILE, seconds=5.0, max_nbytes=FILE)


class TestCommand:
    def test_the_jobs_are_ours(self) -> None:
        command = Fio("/bin/fio", "io_uring").command(pattern("mixed"), "/file", ["--limit"])
        jobs = [index for index, part in enumerate(command) if part.startswith("--name=")]
        assert len(jobs) == 2
        read, write = set(command[jobs[0] : jobs[1]]), set(command[jobs[1] :])
        assert read >= {"--rw=read", "--iodepth=2", "--offset=0", f"--size={FILE // 2}", "--filename=/file", "--limit"}
        assert write >= {"--rw=write", "--iodepth=2", f"--offset={FILE // 2}", f"--size={FILE // 2}", "--limit"}
        assert {"--direct=1", "--overwrite=1", "--randrepeat=0"} < set(command[: jobs[0]])


class TestRuns:
    @pytest.mark.parametrize("op", ["write", "mixed"])
    def test_pairs_move_the_same_bytes(self, scratch: ScratchFile, op: str) -> None:
        """Where fio is missing the pairs have no other side, and say so."""
        fio = scratch.find_fio()
        assert (fio is not None) == has_fio
        ours, theirs = measure_pairs(scratch, pattern(op), rounds=1, fio=fio, warm_up_s=0.01)
        assert len(ours) == 1
        assert len(theirs) == (1 if has_fio else 0)
        row = row_of(pattern(op), ours, theirs, engine="threads", directory="")
        assert (row.ratio_to_fio is not None) == (row.fio_gb_per_s is not None) == has_fio
        if op != "mixed":  # which ends when either direction has moved its half
            assert {one.nbytes for one in (*ours, *theirs)} == {FILE}
        for one in theirs:
            assert one.seconds > 0 <= one.cpu_s
            assert 0 < one.latency.p50_s <= one.latency.p99_s <= one.latency.p999_s
        assert scratch.device.files() == {-1: FILE}

    def test_a_program_that_is_no_fio_is_refused(self, scratch: ScratchFile) -> None:
        with pytest.raises(FioError, match="fio did not report: it said nothing"):
            Fio("/bin/true", "io_uring").run(pattern("read"), scratch.path)

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
            with ScratchFile(place, engine="threads", memory_nbytes=4 * MiB, file_nbytes=FILE, depth=4) as scratch:
                scratch.write_file()
                assert os.stat(scratch.path).st_size == FILE


def test_the_memory_of_fio_is_in_huge_pages(scratch: ScratchFile, tmp_path: Path) -> None:
    """As ours is: by a word to glibc, whose malloc fio's buffers come from."""
    program = tmp_path / "fio"
    program.write_text('#!/bin/sh\necho "$GLIBC_TUNABLES" >&2\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(FioError, match=r"did not report: glibc\.malloc\.hugetlb=1:glibc\.malloc\.perturb=85"):
        Fio(str(program), "io_uring").run(pattern("read"), scratch.path)
    program.unlink()
