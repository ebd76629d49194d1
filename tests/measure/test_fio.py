"""fio's side of a pair: the same blocks, huge pages for its memory, its report read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered.tools.bench.rounds import Fio, FioError, Pattern, ScratchFile
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
        row = row_of(pattern(op), ours, theirs, directory="")
        assert (row.ratio is not None) == (row.reference_gb_per_s is not None) == has_fio
        if op != "mixed":  # which ends when either direction has moved its half
            assert {one.nbytes for one in (*ours, *theirs)} == {FILE}
        for one in theirs:
            assert one.seconds > 0 <= one.cpu_s
            assert 0 < one.latency.p50_s <= one.latency.p99_s <= one.latency.p999_s
        assert scratch.device.files() == {-1: FILE}

    def test_a_program_that_is_no_fio_is_refused(self, scratch: ScratchFile) -> None:
        with pytest.raises(FioError, match="fio did not report: it said nothing"):
            Fio("/bin/true", "io_uring").run(pattern("read"), scratch.path)


def test_the_memory_of_fio_is_in_huge_pages(scratch: ScratchFile, tmp_path: Path) -> None:
    """As ours is: by a word to glibc, whose malloc fio's buffers come from."""
    program = tmp_path / "fio"
    program.write_text('#!/bin/sh\necho "$GLIBC_TUNABLES" >&2\nexit 1\n')
    program.chmod(0o755)
    with pytest.raises(FioError, match=r"did not report: glibc\.malloc\.hugetlb=1:glibc\.malloc\.perturb=85"):
        Fio(str(program), "io_uring").run(pattern("read"), scratch.path)
    program.unlink()
