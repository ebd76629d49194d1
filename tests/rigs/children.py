"""Processes that run the job and may be killed: forked from a nursery that has imported torch and run nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Life", "Nursery"]

_ROOT = Path(__file__).parents[2]
_LIFE_S = 40.0  # longer than any job takes, also beside others
SUCCEEDED, FAILED, BROKE = 0, 3, 4  # exit statuses: all was done; a TieredError; anything else


@dataclass(slots=True)
class Life:
    """What a child reported, and how it ended: SUCCEEDED, FAILED, BROKE, -9 (killed), None (it hung)."""

    opened: int = 0
    sealed: int = 0
    durable: int = 0
    acknowledged: int = 0  # durable before the cut: what is said later nobody could have heard
    error: str = ""
    status: int | None = None
    times: list[float] = field(default_factory=list)  # s since the start, of each report

    def note(self, word: str, value: str, time_s: float) -> None:
        self.times.append(time_s)
        if word == "error":
            self.error = value
        else:
            setattr(self, word, int(value))
        if word == "opened":
            self.sealed = self.durable = self.opened

    @property
    def complaint(self) -> str:
        """What is wrong with how it ended, if anything."""
        if self.status is None:
            return f"it hung after {len(self.times)} reports"
        return f"an error that is not ours: {self.error}" if self.status == BROKE else ""


class Nursery:
    """Runs one child at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.children"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self._rest = b""
        if self._line(60.0) != ["ready"]:
            raise RuntimeError("the nursery did not start")

    def run(
        self,
        request: dict[str, Any],
        *,
        cut: Callable[[], None] | None = None,
        after: int = 0,
        delay_s: float = 0.0,
        kill: bool = False,
    ) -> Life:
        """Run the job of ``request``; call ``cut`` ``delay_s`` after report number ``after``, or when it has ended.

        With ``kill`` the child is killed right after the cut; otherwise it meets what follows.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        start = time.monotonic()
        cut_at = start + delay_s if after == 0 else None
        end, pid, life = start + _LIFE_S, 0, Life()
        while True:
            until = end if cut is None or cut_at is None else min(cut_at, end)
            words = self._line(until - time.monotonic())
            if words is None and cut is not None and cut_at is not None and time.monotonic() >= cut_at:
                life.acknowledged = life.durable  # order: all that was said before the cut has been read
                cut()
                cut = None
                if kill:
                    _kill(pid)
            elif words is None:
                _kill(pid)
                self._wait_for_exit()
                break
            elif words[0] == "exit":
                life.status = int(words[1])
                break
            elif words[0] == "pid":
                pid = int(words[1])
            else:
                life.note(words[0], " ".join(words[1:]), time.monotonic() - start)
                if len(life.times) == after:
                    cut_at = time.monotonic() + delay_s
        if cut is not None:
            life.acknowledged = life.durable
            cut()
        return life

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _wait_for_exit(self) -> None:
        while (words := self._line(_LIFE_S)) is not None and words[0] != "exit":
            pass

    def _line(self, timeout_s: float) -> list[str] | None:
        """Return the words of the next line; None when none has come in time."""
        assert self._process.stdout is not None
        fd, give_up = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
                return None
            received = os.read(fd, 1 << 16)
            if not received:
                raise RuntimeError("the nursery died")
            self._rest += received
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
        if pid:
            os.kill(pid, signal.SIGKILL)


def _be_a_child(request: dict[str, Any]) -> int:
    from tests.rigs import job
    from tiered.errors import TieredError

    def report(word: str, value: object) -> None:
        os.write(1, f"{word} {value}\n".encode())

    if request.get("mutant"):
        job.MUTANTS[request["mutant"]]()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            places, seed, number = request["directories"], request["seed"], request["num_generations"]
            job.run(places, seed, number, request["engine"], report)
    except TieredError as error:
        report("error", repr(error).replace("\n", " "))
        return FAILED
    except BaseException as error:
        report("error", repr(error).replace("\n", " "))
        return BROKE
    return SUCCEEDED


def _be_a_nursery() -> None:
    import gc
    import logging

    import tests.rigs.job  # noqa: F401  # torch is imported by it, and nothing of torch is run

    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    gc.freeze()
    os.write(1, b"ready\n")
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.write(1, f"pid {os.getpid()}\n".encode())
            status = BROKE
            try:
                status = _be_a_child(json.loads(line))
            finally:
                os._exit(status)  # a store that could not be closed must not hold the end up
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(1, f"exit {status}\n".encode())


if __name__ == "__main__":
    _be_a_nursery()
