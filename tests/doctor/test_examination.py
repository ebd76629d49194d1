"""Checks with a deadline: whatever one does, the doctor answers in time, and its own output is all that is said."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bytes.moving import exit_code_of_child
from tests.rigs.warm_python import WarmPython
from tiered.tools.cli import main
from tiered.tools.doctor import doctor as doctor_module
from tiered.tools.doctor.checks import Check, Finding, broken, directory_checks, ok
from tiered.tools.doctor.doctor import examine

ANSWER_S = 60.0  # longer than what does not hang takes anywhere
DEADLINES_S = (0.5, 2.0, 20.0)  # the next one where the machine is too busy to begin within the last


def check(run: Callable[[], object], name: str = "trial", *, is_essential: bool = False) -> Check:
    """Return a check that is fine when ``run`` returns, and says what that was."""
    return Check("here", name, lambda: ok(str(run())), is_essential=is_essential)


def refuse() -> Finding:
    return broken("no", cost="all", mend="nothing")


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.outcome.value) for finding in findings]


@pytest.fixture
def hang() -> Iterator[Callable[[], object]]:
    """A run that hangs until the test is over."""
    is_over = threading.Event()
    yield is_over.wait
    is_over.set()
    for thread in threading.enumerate():
        if thread.name == doctor_module._THREAD:
            thread.join(ANSWER_S)


def test_findings_come_in_the_order_of_the_checks_and_each_group_has_a_thread() -> None:
    groups = [[check(threading.get_ident, "a"), check(threading.get_ident, "b")], [check(os.getpid, "c")], []]
    found = examine(groups, ANSWER_S)
    assert told(found) == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert found[0].found == found[1].found != str(threading.get_ident())
    assert found[2].found == str(os.getpid())


def test_a_check_that_hangs_is_broken_and_holds_up_nobody(hang: Callable[[], object]) -> None:
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


def test_a_check_that_crashes_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        faulthandler.disable()  # pytest's own
        examine([[check(os.abort)]], ANSWER_S)

    assert exit_code_of_child(run) == -signal.SIGABRT
    assert "in _run_checks" in capfd.readouterr().err


def test_a_check_that_hangs_with_the_lock_of_python_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_module, "_GRACE_S", 0.1)
    pause = ctypes.PyDLL(None).pause  # a function of PyDLL keeps the lock
    assert exit_code_of_child(lambda: examine([[check(pause)]], 0.2)[0]) == 1
    assert "Timeout" in (said := capfd.readouterr().err) and "in _run_checks" in said


def test_after_an_essential_check_that_is_broken_the_rest_is_not_tried() -> None:
    checks = [Check("here", "first", refuse, is_essential=True), check(os.getpid, "second")]
    assert told(examine([checks], ANSWER_S)) == [("first", "broken")]
    checks[0] = Check("here", "first", refuse)
    assert told(examine([checks], ANSWER_S)) == [("first", "broken"), ("second", "ok")]


def test_checks_are_silent_and_the_doctor_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print("python")
        os.write(1, b"out")
        os.write(2, b"err")
        logging.getLogger("tiered").warning("log")

    assert told(examine([[check(talk)]], ANSWER_S)) == [("trial", "ok")]
    assert capfd.readouterr() == ("", "")
    print("afterwards")
    os.write(2, b"too")
    assert capfd.readouterr() == ("afterwards\n", "too")
    assert logging.getLogger("tiered").isEnabledFor(logging.WARNING)


def test_an_interruption_is_passed_on(hang: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return hang()

    with pytest.raises(KeyboardInterrupt):
        examine([[check(interrupt)], [check(hang)]], ANSWER_S)
    print("afterwards")
    assert capfd.readouterr().out == "afterwards\n"


@pytest.mark.parametrize("closed", [(0,), (0, 1), (1,), (0, 1, 2)])
def test_closed_streams_are_in_nobodys_way(closed: tuple[int, ...], tmp_path: Path) -> None:
    def run() -> None:
        for stream in closed:
            os.close(stream)
        assert main(["doctor", "/nowhere/at/all", "--json", str(tmp_path / "report.json")]) == 1

    assert exit_code_of_child(run) == 0
    assert "/nowhere/at/all" in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_command_with_a_check_that_hangs_ends(is_interrupted: bool, warm_python: WarmPython) -> None:
    program = (
        "import os, signal, threading, tiered.tools.cli\n"
        "from tiered.tools.doctor import checks, doctor\n"
        "def hang(place):\n"
        f"    if {is_interrupted}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Event().wait()\n"
        "checks.check_flush = hang\n"
        f"doctor.examined.__defaults__ = ({ANSWER_S if is_interrupted else 2.0},)\n"
        "raise SystemExit(tiered.tools.cli.main(['doctor', '/dev/shm', '--json', '-']))\n"
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
            start = time.monotonic()
            finding = examine([directory_checks(str(place))], deadline_s)[-1]
            took_s = time.monotonic() - start
            if "kernel" in finding.found:
                break
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], check=True)
        for thread in threading.enumerate():
            if thread.name == doctor_module._THREAD:
                thread.join(ANSWER_S)  # the drive has answered
    assert told([finding]) == [("writing", "broken")]
    assert finding.found.startswith(f"no answer within {deadline_s:g} s; the trial hangs in the kernel")
    assert took_s < deadline_s + ANSWER_S
