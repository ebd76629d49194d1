"""Checks in child processes: whatever one does, there is a finding, in time, and no process is left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.bytes.moving import exit_code_of_child
from tiered.doctor import examination
from tiered.doctor.directory import directory_checks
from tiered.doctor.examination import examine
from tiered.doctor.finding import Check, Finding, Outcome, broken, ok

ANSWER_S = 60.0  # longer than what does not hang takes anywhere
DEADLINES_S = (0.2, 2.0, 20.0)  # the next one where the machine is too busy to begin within the last


def check(run: Callable[[], object], name: str = "trial", *, is_essential: bool = False) -> Check:
    """Return a check that is fine when ``run`` returns, and says what that was."""
    return Check("here", name, lambda: ok("here", name, str(run())), is_essential=is_essential)


def hang() -> None:
    while True:
        signal.pause()


def refuse() -> Finding:
    return broken("here", "first", "no", cost="all", mend="nothing")


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.outcome.value) for finding in findings]


@pytest.fixture(autouse=True)
def no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However long a killed child takes to end on a machine that is busy, it is waited for."""
    monkeypatch.setattr(examination, "_GRACE_S", ANSWER_S)
    before = children()
    yield
    assert children() <= before


def children() -> set[int]:
    """Return the ids of this process's children, those that nobody has waited for included."""
    return {child.pid for child in psutil.Process().children()}


def test_findings_come_in_the_order_of_the_checks_and_from_another_process() -> None:
    groups = [[check(os.getpid, "a"), check(os.getpid, "b")], [check(os.getpid, "c")], []]
    found = examine(groups, ANSWER_S)
    assert told(found) == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert found[0].found == found[1].found != found[2].found
    assert str(os.getpid()) not in {finding.found for finding in found}


def test_a_check_that_hangs_is_broken_and_holds_up_nobody() -> None:
    groups = [[check(os.getpid, "a"), check(hang, "b"), check(os.getpid, "c")], [check(os.getpid, "d")]]
    for deadline_s in DEADLINES_S:
        start = time.monotonic()
        found = examine(groups, deadline_s)
        took_s = time.monotonic() - start
        if told(found)[0] == ("a", "ok") and told(found)[-1] == ("d", "ok"):
            break
    assert told(found) == [("a", "ok"), ("b", "broken"), ("d", "ok")]
    assert f"no answer within {deadline_s:g} s" in found[1].found
    assert took_s < deadline_s + ANSWER_S


def test_a_check_that_raises_is_broken_and_the_next_one_is_tried() -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    found = examine([[check(fail, "a"), check(os.getpid, "b")]], ANSWER_S)
    assert told(found) == [("a", "broken"), ("b", "ok")]
    assert "Input/output error" in found[0].found


def test_a_check_that_crashes_is_broken() -> None:
    found = examine([[check(lambda: os.kill(os.getpid(), signal.SIGTERM))], [check(lambda: os._exit(3))]], ANSWER_S)
    assert [finding.found for finding in found] == [
        "the trial's process was killed by SIGTERM",
        "the trial's process ended without an answer",
    ]
    assert {finding.outcome for finding in found} == {Outcome.BROKEN}


def test_after_an_essential_check_that_is_broken_the_rest_is_not_tried() -> None:
    checks = [Check("here", "first", refuse, is_essential=True), check(os.getpid, "second")]
    assert told(examine([checks], ANSWER_S)) == [("first", "broken")]
    checks[0] = Check("here", "first", refuse)
    assert told(examine([checks], ANSWER_S)) == [("first", "broken"), ("second", "ok")]


def test_a_long_answer_arrives_whole() -> None:
    (finding,) = examine([[check(lambda: "x" * (1 << 20))]], ANSWER_S)
    assert len(finding.found) == 1 << 20


def test_children_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        os.write(1, b"out")
        os.write(2, b"err")
        logging.getLogger("tiered").warning("log")

    assert told(examine([[check(talk)]], ANSWER_S)) == [("trial", "ok")]
    assert capfd.readouterr() == ("", "")


def test_who_ignores_the_ends_of_children_gets_findings_too() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        found = examine([[check(os.getpid, "a")], [check(lambda: os._exit(3), "b")]], ANSWER_S)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert told(found) == [("a", "ok"), ("b", "broken")]


@pytest.mark.parametrize("closed", [(0,), (0, 1), (1,), (0, 1, 2)])
def test_closed_streams_are_in_nobodys_way(closed: tuple[int, ...]) -> None:
    def run() -> None:
        for stream in closed:
            os.close(stream)
        assert told(examine([[check(os.getpid, "a")], [check(os.getpid, "b")]], ANSWER_S)) == [("a", "ok"), ("b", "ok")]

    assert exit_code_of_child(run) == 0


def test_an_interruption_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiered.doctor.examination._listen", interrupt)
    with pytest.raises(KeyboardInterrupt):
        examine([[check(hang)], [check(hang)]], 60)


def test_a_drive_that_hangs_is_reported(
    tmp_path: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen file system holds a writer in the kernel, where no signal reaches it, as a dead drive does."""
    monkeypatch.setattr(examination, "_GRACE_S", 0.5)
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    place = mount("-o", "loop", str(image))
    subprocess.run(["fsfreeze", "--freeze", place], check=True)
    try:
        for deadline_s in DEADLINES_S:
            start = time.monotonic()
            finding = examine([directory_checks(str(place))], deadline_s)[-1]
            took_s = time.monotonic() - start
            if "process" in finding.found:
                break
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
    said, _, process = finding.found.partition("; process ")
    os.waitpid(int(process.split()[0]), 0)  # the drive has answered: the child can end
    assert (finding.check, finding.outcome) == ("writing", Outcome.BROKEN)
    assert said == f"no answer within {deadline_s:g} s" and "hangs in the kernel" in finding.found
    assert took_s < deadline_s + ANSWER_S
