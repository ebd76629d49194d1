"""The soak: one process for a long time, short of memory, on a slow drive that is full now and then.

It lives in a memory cgroup and writes through a throttle to an ext4 on a loop device. The throttle changes at random,
down to what is a delay of a second; a balloon takes all free space for a moment, again and again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.rigs.cgroup import limited_memory, throttled
from tests.rigs.drives import Shutdown
from tests.rigs.room import room
from tiered.units import MiB

__all__ = ["Endurance", "complaint", "endurance", "slope_kib"]

_ROOT = Path(__file__).parents[2]
_BYTES_PER_S = (2 * MiB, 8 * MiB, 50 * MiB, 200 * MiB)
_WARM_UP = 24  # cycles in which buffers, threads and code are used for the first time; some a full drive ends
_MOST_KIB = 4096  # that the medians of the two halves may differ by: where malloc's pages lie changes


def slope_kib(values: Sequence[float]) -> float:
    """Return the slope of ``values`` per 100 steps: the median of the slopes between pairs half of them apart."""
    half = len(values) // 2
    return 100 * median((values[i + half] - values[i]) / half for i in range(half)) if half else 0.0


def complaint(samples: Sequence[dict[str, Any]]) -> str:
    """Return what grows or stays over the cycles; "" when nothing does."""
    found = [f"{sample['cycle']} left {sample['left']}" for sample in samples if sample["left"]]
    steady = samples[_WARM_UP:]
    if len(steady) >= _WARM_UP:
        for name in ("descriptors", "threads"):
            counts = sorted({sample[name] for sample in steady})
            if len(counts) > 1:
                found.append(f"{name} between {counts[0]} and {counts[-1]}")
        memory = [sample["rss_kib"] for sample in steady]
        half = len(memory) // 2
        if median(memory[half:]) - median(memory[:half]) > _MOST_KIB:
            found.append(f"memory grows by {slope_kib(memory):.0f} KiB in 100 cycles")
    return "; ".join(found)


@dataclass(slots=True)
class Endurance:
    """One life of the process, and what it said after each cycle."""

    process: subprocess.Popen[str]
    samples: list[dict[str, Any]] = field(default_factory=list)

    def run(self, cycles: Sequence[int]) -> str:
        """Run ``cycles`` and return what is wrong."""
        assert self.process.stdin is not None and self.process.stdout is not None
        for number in cycles:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            if not line:
                return f"the process died in cycle {number}: status {self.process.wait()}"
            self.samples.append(json.loads(line))
            if self.samples[-1]["wrong"]:
                return str(self.samples[-1]["wrong"])
        return complaint(self.samples)

    @property
    def num_refused(self) -> int:
        """Cycles that the full drive ended."""
        return sum(sample["refused"] for sample in self.samples)


@contextmanager
def endurance(memory_nbytes: int, seed: int) -> Iterator[Endurance]:
    """Give a process under ``memory_nbytes``, disturbed until the block ends; then all of it goes."""
    with room() as made, limited_memory(memory_nbytes) as memory:
        mount = Shutdown(made, "ext4").mounts[0]
        with throttled(mount, bytes_per_s=_BYTES_PER_S[-1]) as throttle:
            if isinstance(memory, str) or isinstance(throttle, str):
                raise RuntimeError(f"{memory}; {throttle}")
            process = _start(mount, memory, throttle)
            over = threading.Event()
            disturber = threading.Thread(target=_disturb, args=(mount, throttle, seed, over), name="disturber")
            disturber.start()
            try:
                yield Endurance(process)
            finally:
                over.set()
                disturber.join()
                process.kill()
                process.communicate()


def _start(mount: Path, *groups: Path) -> subprocess.Popen[str]:
    enter = "".join(f'echo $$ > "{group}"/cgroup.procs && ' for group in groups)
    command = ["sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-m", "tests.rigs.long_job", str(mount)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"the process did not start: status {process.wait()}")
    return process


def _disturb(mount: Path, throttle: Path, seed: int, over: threading.Event) -> None:
    """Change the throttle and blow up the balloon, at random, until ``over``."""
    rng = random.Random(seed)
    device = os.stat(mount).st_dev
    while not over.wait(rng.uniform(0.05, 0.5)):
        limit = f"{os.major(device)}:{os.minor(device)} {rng.choice(_BYTES_PER_S)}"
        (throttle / "blkio.throttle.write_bps_device").write_text(limit)
        if rng.random() < 0.3:
            _burst(mount, rng.uniform(0.05, 0.6), over)


def _burst(mount: Path, seconds: float, over: threading.Event) -> None:
    """Leave no space for so long."""
    balloon = mount / "balloon"
    try:
        with open(balloon, "wb") as file:
            free = os.statvfs(mount)
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bfree * free.f_bsize))
            except OSError:  # the process was quicker: what is there will do
                pass
            over.wait(seconds)
    finally:
        balloon.unlink(missing_ok=True)
