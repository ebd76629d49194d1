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
from tests.bytes.moving import exit_code_of_child
from tests.train.test_loop import TINY
from tiered.tools.cli import main
from tiered.tools.console import Interruption, lasting_streams
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


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_run_whose_reader_is_gone_makes_all_of_its_steps(
    is_closed: bool, tmp_path: Path, unread: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_closed:
        monkeypatch.setattr(sys, "stdout", None)
    assert main(arguments(tmp_path)) == 0
    found = find_run([tmp_path / "run"])
    assert found is not None and found.state["step"] == 3
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0


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


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_closed_descriptors_are_not_given_to_a_stores_files(stream: int) -> None:
    def run() -> None:
        os.close(stream)
        with lasting_streams():
            assert os.open(os.devnull, os.O_RDONLY) > 2

    assert exit_code_of_child(run) == 0


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


@pytest.mark.parametrize(("second", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_request_and_the_second_ends_the_process_with_its_status(
    second: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr("os._exit", statuses.append)
    before = signal.getsignal(signal.SIGINT)
    with Interruption("stopping soon", lambda: "gone", signals=(signal.SIGINT, signal.SIGTERM)) as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested and not statuses and capfd.readouterr().err == "\nstopping soon\n"
        signal.raise_signal(second)
    assert statuses == [status] and "gone" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_whose_notice_nobody_reads_is_a_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise BrokenPipeError

    with Interruption("stopping soon", lambda: "gone") as interruption, monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested
