"""``tiered train`` on a compute device of its own memory, whole and small: train, go on, go back to the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.training import DEVICE
from tiered.tools.cli import main
from tiered.zero.compute_device import named_device

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "32", "--dram", "32MiB")
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Call ``tiered train`` on the tiny model, with its figures in ``run.json``."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"one word, one meaning; " * 1300)

    def call(*options: str) -> int:
        places = ("--store", str(tmp_path / "run"), "--json", str(tmp_path / "run.json"))
        return main(["train", *places, *(() if "--resume" in options else ("--data", str(text), *TINY)), *options])

    return call


@pytest.mark.parametrize(
    "options",
    [("--device-memory", "16MiB", "--update-on", "device"), ("--accumulate", "2", "--clip", "1", "--update-on", "cpu")],
)
def test_a_run_says_what_the_device_did(
    options: tuple[str, ...], run: Run, accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--steps", "3", "--timeline", str(tmp_path / "timeline.json"), *options) == 0
    out, err = capsys.readouterr()
    assert not err
    assert f"\ndevice  {DEVICE}:0 (" in out
    assert f"\ndevice  {DEVICE}:0: peak " in out and "\npeak " in out and ", PCIe " in out
    assert out.splitlines()[-1].startswith("verdict ")
    found = json.loads((tmp_path / "run.json").read_text())
    device = found["device"]
    assert device["copied_in_bytes_per_param"] > 0 and device["copied_out_bytes_per_param"] > 0
    assert 0 < device["peak_bytes"] <= device["budget_bytes"]
    assert device["share_of_peak"] > 0
    drawn = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in drawn if event["name"] == "thread_name"}
    assert {"stream: compute", "stream: copy in", "stream: copy out"} <= names


def test_a_run_goes_on_there_and_comes_back(run: Run, accelerator: Any, tmp_path: Path) -> None:
    assert run("--steps", "2", "--device", "cpu") == 0
    losses = json.loads((tmp_path / "run.json").read_text())["losses"]
    assert run("--resume", "--steps", "4", "--device", DEVICE, "--update-on", "cpu") == 0
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["steps"] == [3, 4] and found["losses"][-1] < losses[0]
    assert run("--resume", "--steps", "5", "--device", "cpu") == 0
    assert "device" not in json.loads((tmp_path / "run.json").read_text())


def test_auto_says_in_the_log_what_it_took_and_why(accelerator: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tiered"):
        assert (named_device("auto").type, named_device("auto", 0).type) == (DEVICE, "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        f'device="auto" is {DEVICE}: the accelerator of this process', 'device="auto" is cpu: device_memory is 0'
    ]  # fmt: skip


def test_auto_without_an_accelerator_says_so(
    run: Run, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tiered"):
        assert run("--steps", "1") == 0
    assert 'device="auto" is cpu: this process has no accelerator' in caplog.text
    assert "\ndevice  the CPU: this process has no accelerator\n" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--device", "cuda") == 2
    assert "expected 'auto', 'cpu' or the accelerator of this process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
