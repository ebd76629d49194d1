"""fio as the reference: the same pattern on the same file, in huge pages as ours.

fio runs as a process of its own. Its CPU time is the kernel's count for its jobs, less the cost of its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import DeviceError
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import Latency, Moved

__all__ = ["Fio", "FioError", "FioRound", "find_fio", "open_file_path"]

_ENGINES = ("io_uring", "libaio")  # the first that works here; no other keeps a depth
_START_NOISE_S = 0.01  # CPU; measured: within 5 ms
# fio's buffers come from malloc: in huge pages (glibc 2.35), and written to before they are used, as ours are, or the
# kernel would look for those pages while it is timed.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.perturb=85"}
_START_S = 30.0  # the time that fio may take beyond its run time before it is called stuck


class FioError(DeviceError):
    """fio is there and failed; its measurement is not known."""


@dataclass(frozen=True, slots=True)
class FioRound(Moved):
    """The figures of one run of fio."""

    latency: Latency


class Fio:
    """A way to call fio: its path, the engine that works here, and the cost of a start per pattern."""

    def __init__(self, program: str, engine: str) -> None:
        self.engine = engine
        self._program = program
        self._start_cpu_s: dict[tuple[str, int, int], float] = {}

    def calibrate(self, pattern: Pattern, file: str) -> None:
        """Measure the CPU cost of fio's start for ``pattern``, and warm it up; blocks."""
        limits = ["--number_ios=1"]
        cpu_s, _ = self._run(pattern, file, limits, wait_s=_START_S)
        self._start_cpu_s[self._key(pattern)] = cpu_s

    def run(self, pattern: Pattern, file: str) -> FioRound:
        """Run ``pattern`` on ``file`` and return fio's figures; blocks.

        Raises FioError when fio fails. Interrupted, it ends fio.
        """
        limits = [f"--runtime={max(1, round(pattern.seconds * 1000))}ms"]
        if pattern.max_blocks is None:
            limits.append("--time_based")
        else:
            limits.append(f"--io_size={pattern.max_blocks * pattern.block_nbytes}")
        cpu_s, report = self._run(pattern, file, limits, wait_s=pattern.seconds + _START_S)
        # The jobs' own count leaves out io_uring's kernel workers, the process's has a start of uncertain length.
        cpu_s -= self._start_cpu_s.get(self._key(pattern), cpu_s) + _START_NOISE_S
        return _parse(report, cpu_s)

    def command(self, pattern: Pattern, file: str, limits: Sequence[str]) -> list[str]:
        """Return the command line: one job per direction, each over the same blocks as ours."""
        command = [
            self._program, "--output-format=json", f"--ioengine={self.engine}", "--direct=1", "--overwrite=1",
            "--allow_file_create=0", "--randrepeat=0", "--scramble_buffers=0", f"--bs={pattern.block_nbytes}",
            "--clat_percentiles=0", "--lat_percentiles=1", "--percentile_list=50:99:99.9",
        ]  # fmt: skip
        if pattern.op == "mixed":
            command.append("--exitall")
        for index, direction in enumerate(pattern.directions):
            command += [
                f"--name={'write' if direction.is_write else 'read'}-{index}", f"--filename={file}",
                f"--rw={'write' if direction.is_write else 'read'}", f"--iodepth={direction.depth}",
                f"--offset={direction.first_block * pattern.block_nbytes}",
                f"--size={direction.num_blocks * pattern.block_nbytes}", *limits,
            ]  # fmt: skip
        return command

    def _key(self, pattern: Pattern) -> tuple[str, int, int]:
        return pattern.op, pattern.block_nbytes, pattern.depth

    def _run(
        self, pattern: Pattern, file: str, limits: Sequence[str], *, wait_s: float
    ) -> tuple[float, Mapping[str, Any]]:
        """Return the CPU-seconds of the process and its report."""
        output, error, cpu_s = _call(self.command(pattern, file, limits), wait_s)
        try:
            report: Mapping[str, Any] = json.loads(output[output.index("{") :])
        except ValueError:
            raise FioError(f"fio did not report: {_first_line(error or output)}") from None
        failed = next((job for job in report["jobs"] if job["error"]), None)
        if failed:
            raise FioError(f"fio failed with error {failed['error']}: {_first_line(error or output)}")
        return cpu_s, report


def find_fio(trial: str, block_nbytes: int) -> Fio | None:
    """Return a way to call fio that works on the file at path ``trial``, or None: there is none. Blocks.

    Raises FioError for a fio that is there and works with no engine.
    """
    program = shutil.which("fio")
    if program is None:
        return None
    pattern = Pattern("read", block_nbytes, 1, block_nbytes, seconds=0.01)
    reason: FioError | None = None
    for engine in _ENGINES:
        fio = Fio(program, engine)
        try:
            fio.calibrate(pattern, trial)
        except FioError as error:
            reason = reason or error
            continue
        return fio
    raise FioError(f"{program} is there and does not work: {reason}; mend it or take it off the path") from reason


def open_file_path(device: FileDevice) -> str:
    """Return a path of the unnamed file of ``device``, for other processes to open; it is good until the device closes.

    Raises DeviceError when there is no such file.
    """
    return f"/proc/{os.getpid()}/fd/{device.descriptor(SCRATCH)}"


def _call(command: Sequence[str], wait_s: float) -> tuple[str, str, float]:
    """Run ``command``; return its output, its standard error and its CPU-seconds."""
    with _process(command) as process:
        try:
            output, error = process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            raise FioError(f"fio did not end within {wait_s:.0f} s; check the drive") from None
        return output, error, process.cpu_s


class _TimedProcess(subprocess.Popen[str]):
    """A process whose CPU time, children that it waited for included, is known once it has ended."""

    cpu_s = 0.0

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        pid, status, usage = os.wait4(self.pid, wait_flags)
        if pid == self.pid:
            self.cpu_s = usage.ru_utime + usage.ru_stime
        return pid, status


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[_TimedProcess]:
    process = _TimedProcess(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_HUGE_PAGES},
        process_group=0,  # Ctrl-C on the terminal is ours to obey: after the round
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _parse(report: Mapping[str, Any], least_cpu_s: float) -> FioRound:
    jobs_cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in report["jobs"])
    sides = [job[verb] for job in report["jobs"] for verb in ("read", "write") if job[verb]["io_bytes"]]
    if not sides:
        raise FioError("fio moved no byte; check the drive")
    slowest = max(sides, key=lambda side: float(side["lat_ns"]["percentile"]["99.000000"]))["lat_ns"]
    p50, p99, p999 = (float(slowest["percentile"][key]) / 1e9 for key in ("50.000000", "99.000000", "99.900000"))
    return FioRound(
        read_nbytes=sum(job["read"]["io_bytes"] for job in report["jobs"]),
        write_nbytes=sum(job["write"]["io_bytes"] for job in report["jobs"]),
        seconds=max(side["runtime"] for side in sides) / 1000,  # fio counts whole milliseconds
        cpu_s=max(jobs_cpu_s, least_cpu_s),
        latency=Latency(p50, p99, p999, float(slowest["max"]) / 1e9),
    )


def _first_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip())[:200] or "it said nothing"
