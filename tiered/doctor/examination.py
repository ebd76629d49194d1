"""Checks in child processes: a check that hangs, crashes or raises is a finding, and does not end the doctor."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import time
import warnings
from collections.abc import Sequence

from tiered.doctor.finding import Check, Finding, broken

__all__ = ["examine"]

_GRACE_S = 0.5  # for a killed child to end; a child that waits for a drive cannot
_READ_NBYTES = 1 << 16


def examine(groups: Sequence[Sequence[Check]], deadline_s: float) -> list[Finding]:
    """Run the checks of each group in order, the groups side by side; return their findings after ``deadline_s``.

    A check that raises, ends its process or has not answered by then is broken, and the rest of its group is not tried.
    Blocks for little more than ``deadline_s``, whatever the drives do: a child that cannot be killed is left to its
    drive. Forks: no other thread of this process may hold a lock that a check takes.
    """
    examinations: list[_Examination] = []
    give_up = time.monotonic() + deadline_s
    try:
        for checks in groups:
            examinations.append(_Examination(checks, [examination.fd for examination in examinations]))
        _listen(examinations, give_up)
    finally:
        for examination in examinations:
            examination.end()
    return [finding for examination in examinations for finding in examination.findings(deadline_s)]


def _listen(examinations: Sequence[_Examination], give_up: float) -> None:
    """Read the children's answers until all have answered, or the time has come."""
    poll = select.poll()
    by_fd = {examination.fd: examination for examination in examinations}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while by_fd and (left_s := give_up - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            if not by_fd[fd].hear():
                poll.unregister(fd)
                del by_fd[fd]


class _Examination:
    """One child with its checks. ``fd`` is where it is heard; it is open until ``end``."""

    def __init__(self, checks: Sequence[Check], inherited: Sequence[int]) -> None:
        self._checks = checks
        self._said = b""
        self._status: int | None = None  # of the child, once it has ended
        self._is_finished = False  # said all it had to say
        self.fd, write_end = _pipe_above_streams()
        try:
            with warnings.catch_warnings():
                # Python warns of forks beside threads: those of torch's and numpy's libraries are idle here.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except BaseException:
            os.close(self.fd)
            os.close(write_end)
            raise
        if self._pid == 0:
            try:
                for fd in (*inherited, self.fd):
                    os.close(fd)
                _run(checks, write_end)
            finally:
                os._exit(0)
        os.close(write_end)

    def hear(self) -> bool:
        """Read the answer so far; False at the end."""
        part = os.read(self.fd, _READ_NBYTES)
        self._said += part
        self._is_finished = not part
        return bool(part)

    def end(self) -> None:
        """Kill the child where it still runs, and take leave of it."""
        os.close(self.fd)
        if not self._is_finished:
            os.kill(self._pid, signal.SIGKILL)
        give_up = time.monotonic() + _GRACE_S
        while self._status is None:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # where SIGCHLD is ignored the kernel waits for it, and tells no status
                pid, status = self._pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > give_up:
                return
            else:
                select.select([], [], [], 0.005)

    def findings(self, deadline_s: float) -> list[Finding]:
        """Return the findings; the first check without an answer is broken."""
        found = [Finding.of_json(json.loads(line)) for line in self._said.splitlines(keepends=True) if _is_whole(line)]
        if found and found[-1].outcome == "broken" and self._checks[len(found) - 1].is_essential:
            return found
        if len(found) < len(self._checks):
            found.append(self._unanswered(self._checks[len(found)], deadline_s))
        return found

    def _unanswered(self, check: Check, deadline_s: float) -> Finding:
        mend = "see the kernel log (dmesg) for the reason"
        if self._is_finished:
            status = self._status or 0
            what = f"was killed by {signal.Signals(-status).name}" if status < 0 else "ended without an answer"
            return broken(check.subject, check.name, f"the trial's process {what}", cost="not known", mend=mend)
        stuck = f"; process {self._pid} hangs in the kernel" if self._status is None else ""
        return broken(
            check.subject,
            check.name,
            f"no answer within {deadline_s:g} s{stuck}",
            cost="whatever needs it hangs as well; what comes after it was not tried",
            mend=mend,
        )


def _pipe_above_streams() -> tuple[int, int]:
    """Return a pipe's two ends; none is a standard stream, closed ones included: a child puts those elsewhere."""
    ends = os.pipe()
    moved: list[int] = []
    try:
        for end in ends:
            moved.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
    except BaseException:
        for end in moved:
            os.close(end)
        raise
    finally:
        for end in ends:
            os.close(end)
    return moved[0], moved[1]


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n")


def _run(checks: Sequence[Check], fd: int) -> None:
    """Run ``checks`` in this child and write one JSON line for each to ``fd``."""
    logging.disable()  # the findings say it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)  # so do the remarks of libraries
    for check in checks:
        try:
            finding = check.run()
        except Exception as error:
            finding = broken(
                check.subject,
                check.name,
                f"the trial failed: {str(error) or repr(error)}"[:1000],
                cost="not known",
                mend="see the kernel log (dmesg) for the reason",
            )
        os.write(fd, f"{json.dumps(finding.as_json())}\n".encode())
        if check.is_essential and finding.outcome == "broken":
            return
