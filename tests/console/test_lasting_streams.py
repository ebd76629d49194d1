"""Commands whose reader is gone, who have no standard output, or who are interrupted."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiered
import tiered.tools.inspect
from tests.train.test_loop import TINY
from tiered.tools.cli import main
from tiered.tools.console.interruption import Interruption
from tiered.tools.console.lasting_streams import _fill_descriptors, lasting_streams
from tiered.tools.inspect import find_run
from tiered.tools.train.task import Loader


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """Standard output into a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream


def arguments(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_bytes(b"one word, one meaning; " * 1300)
    return ["train", *TINY, "--data", str(text), "--store", str(tmp_path / "run"), "--steps", "3"]


def test_a_run_whose_reader_is_gone_makes_all_of_its_steps(tmp_path: Path, unread: io.TextIOWrapper) -> None:
    assert main(arguments(tmp_path)) == 0
    found = find_run([tmp_path / "run"])
    assert found is not None and found.state["step"] == 3
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_a_run_without_a_standard_output_makes_all_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments(tmp_path)) == 0
    found = find_run([tmp_path / "run"])
    assert found is not None and found.state["step"] == 3


def test_the_doctors_status_is_that_of_the_machine_whoever_reads(
    unread: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (0, 1):

        def show(*_: object, status: int = status) -> int:
            print("a table", flush=True)
            return status

        monkeypatch.setattr("tiered.tools.doctor.doctor.doctor", show)
        assert main(["doctor"]) == status


def test_what_is_left_in_a_buffer_does_not_fail_at_the_end(unread: io.TextIOWrapper) -> None:
    with lasting_streams():
        print("into the buffer")
    unread.flush()


def test_output_that_finds_no_space_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiered.Store(tmp_path / "run", dram="16MiB").close()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "tiered: No space left on device: /dev/full\n"


def test_closed_descriptors_are_not_given_to_a_stores_files(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = os.fstat

    def fstat(number: int) -> os.stat_result:
        if number == 1:
            raise OSError(9, "Bad file descriptor")
        return real(number)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "open", lambda *_: 1)
    monkeypatch.setattr(os, "dup2", lambda old, new: opened.append(new))

    _fill_descriptors()
    assert opened == [1]


@pytest.mark.parametrize("command", ["inspect", "verify", "gc"])
def test_ctrl_c_is_answered_in_every_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    for name in ("inspect_run", "check", "clean"):
        monkeypatch.setattr(tiered.tools.inspect, name, interrupted)
    assert main([command, str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_sigterm_in_a_step_commits_it_and_ends_with_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    draw = Loader.__next__

    def draw_and_terminate(loader: Loader) -> Any:
        if loader.position == 1:
            signal.raise_signal(signal.SIGTERM)
        return draw(loader)

    monkeypatch.setattr(Loader, "__next__", draw_and_terminate)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert main(arguments(tmp_path)) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capfd.readouterr()
    assert "stopping as soon as the step in hand is finished" in said.err
    assert "stopped by SIGTERM; the run is resumable from step 2" in said.out


def test_a_second_signal_of_another_kind_ends_the_process_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    with Interruption("stopping soon", lambda: "gone", signals=(signal.SIGINT, signal.SIGTERM)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert statuses == [143]
    assert "gone" in capfd.readouterr().err


def test_a_signal_whose_notice_nobody_reads_is_a_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise BrokenPipeError

    with Interruption("stopping soon", lambda: "gone") as interruption, monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested
