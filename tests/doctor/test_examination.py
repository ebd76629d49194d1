"""Checks with a deadline: whatever one does, the doctor answers in time, and its own output is all that is said."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bytes.moving import exit_code_of_child
from tests.rigs.warm_python import WarmPython
from tiered.tools.cli import main
from tiered.tools.console import MAY_HANG
from tiered.tools.doctor.checks import Checks, Finding, broken, directory_checks, ok
from tiered.tools.doctor.doctor import examine

ANSWER_S = 60.0  # longer than what does not hang takes anywhere
DEADLINES_S = (0.5, 2.0, 20.0)  # the next one where the machine is too busy to begin within the last


def group(**named: Callable[[], object]) -> Checks:
    """Return checks that are fine when their call returns, and say what that was."""
    return "here", {name: lambda call=call: ok(str(call())) for name, call in named.items()}  # type: ignore[misc]


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.outcome.value) for finding in findings]


def wait_for_checks() -> None:
    for thread in threading.enumerate():
        if thread.name == MAY_HANG:
            thread.join(ANSWER_S)


@pytest.fixture
def hang() -> Iterator[Callable[[], object]]:
    """A call that hangs until the test is over."""
    is_over = threading.Event()
    yield is_over.wait
    is_over.set()
    wait_for_checks()


def test_findings_come_in_the_order_of_the_checks_and_each_group_has_a_thread() -> None:
    found = examine([group(a=threading.get_ident, b=threading.get_ident), group(c=os.getpid), group()], ANSWER_S)
    assert told(found) == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert found[0].found == found[1].found != str(threading.get_ident())
    assert found[2].found == str(os.getpid())


def test_a_check_that_hangs_is_broken_and_holds_up_nobody(hang: Callable[[], object]) -> None:
    for deadline_s in DEADLINES_S:
        start = time.monotonic()
        found = examine([group(a=os.getpid, b=hang, c=os.getpid, d=os.getpid), group(e=os.getpid)], deadline_s)
        took_s = time.monotonic() - start
        if told(found)[0] == ("a", "ok") and told(found)[-1] == ("e", "ok"):
            break
    assert told(found) == [("a", "ok"), ("b", "broken"), ("e", "ok")]
    assert found[1].found == f"no answer within {deadline_s:g} s"
    assert found[1].cost.endswith("not tried after it: c, d")
    assert took_s < deadline_s + ANSWER_S


def test_a_check_that_raises_is_broken_and_the_next_one_is_tried() -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    found = examine([group(first=os.getpid, a=fail, b=os.getpid)], ANSWER_S)
    assert told(found) == [("first", "ok"), ("a", "broken"), ("b", "ok")]
    assert "Input/output error" in found[1].found


def test_after_a_first_check_that_is_broken_the_rest_is_not_tried() -> None:
    subject, named = group(second=os.getpid)
    first = {"first": lambda: broken("no", cost="all", mend="nothing")}
    assert told(examine([(subject, first | named)], ANSWER_S)) == [("first", "broken")]


def test_checks_log_and_warn_of_nothing_and_the_doctor_does(capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("a warning of torch", file=sys.stderr)
        logging.getLogger("tiered").warning("log")

    assert told(examine([group(trial=talk)], ANSWER_S)) == [("trial", "ok")]
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("tiered").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("closed", [(0,), (0, 1), (1,), (0, 1, 2)])
def test_closed_streams_are_in_nobodys_way(closed: tuple[int, ...], tmp_path: Path) -> None:
    def run() -> None:
        for stream in closed:
            os.close(stream)
        assert main(["doctor", "/nowhere/at/all", "--json", str(tmp_path / "report.json")]) == 1

    assert exit_code_of_child(run) == 0
    assert "/nowhere/at/all" in (tmp_path / "report.json").read_text()


def test_a_slow_check_ends_no_process(
    hang: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that calls the command line goes on, with its status: only a process of the command's own ends."""
    monkeypatch.setattr("tiered.tools.doctor.checks.check_flush", lambda directory: ok(str(hang())))
    monkeypatch.setattr("tiered.tools.doctor.doctor.examined.__defaults__", (0.5,))
    assert main(["doctor", "/dev/shm"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "flush" in said and "no answer within 0.5 s" in said and "broken here: " in said


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_command_with_a_check_that_hangs_ends(is_interrupted: bool, warm_python: WarmPython) -> None:
    program = (
        "import os, signal, sys, threading, tiered.tools.cli\n"
        "from tiered.tools.doctor import checks, doctor\n"
        "def hang(place):\n"
        f"    if {is_interrupted}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Event().wait()\n"
        "checks.check_flush = hang\n"
        f"doctor.examined.__defaults__ = ({ANSWER_S if is_interrupted else 2.0},)\n"
        "sys.argv = ['tiered', 'doctor', '/dev/shm', '--json', '-']\n"
        "raise SystemExit(tiered.tools.cli.main())\n"
    )
    done = subprocess.run([warm_python.executable, "-c", program], capture_output=True, text=True, timeout=300)
    if is_interrupted:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
    else:
        assert (done.returncode, done.stderr) == (1, "")
        assert "no answer within 2 s" in done.stdout and done.stdout.endswith("}\n")


def test_a_drive_that_hangs_is_reported(tmp_path: Path, mount: Callable[..., Path]) -> None:
    """A frozen file system holds a writer in the kernel, where no signal reaches it, as a dead drive does."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    place = mount("-o", "loop", str(image))
    subprocess.run(["fsfreeze", "--freeze", place], check=True)
    try:
        for deadline_s in DEADLINES_S:
            finding = examine([directory_checks(str(place))], deadline_s)[-1]
            if "kernel" in finding.found:
                break
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
        wait_for_checks()  # the drive has answered
    assert told([finding]) == [("writing", "broken")]
    assert finding.found.startswith(f"no answer within {deadline_s:g} s; the trial hangs in the kernel")
