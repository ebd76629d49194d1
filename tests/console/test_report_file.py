"""Files for reports that cannot be written, and are known to be before the work or named after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tiered
from tests.store.test_leftovers import plant
from tests.train.test_loop import TINY
from tiered.errors import UsageError
from tiered.tools.cli import main
from tiered.tools.console import check_writable


def test_gc_removes_nothing_before_its_report_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiered.Store(tmp_path / "run", dram="16MiB").close()
    plant(tmp_path / "run" / "identity.new")
    assert main(["gc", str(tmp_path / "run"), "--yes", "--json", "/nowhere/report.json"]) == 2
    assert "cannot write /nowhere/report.json" in capsys.readouterr().err
    assert (tmp_path / "run" / "identity.new").exists()


def test_one_file_is_not_taken_for_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "report", tmp_path / "link"
    link.symlink_to(file)
    assert main(["train", "--store", str(tmp_path / "run"), "--json", str(file), "--timeline", str(link)]) == 2
    assert f"{file} is given for two reports" in capsys.readouterr().err
    assert not file.exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--json", "--timeline"])
def test_a_report_that_fails_after_all_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"one word, one meaning; " * 1300)
    places = ["--data", str(text), "--store", str(tmp_path / "run")]
    assert main(["train", *TINY, *places, "--steps", "1", "--quiet", option, "/dev/full"]) == 2
    assert "cannot write /dev/full: No space left on device" in capsys.readouterr().err


def test_looking_leaves_what_is_there(tmp_path: Path) -> None:
    kept, pipe = tmp_path / "kept", tmp_path / "pipe"
    kept.write_text("mine")
    os.mkfifo(pipe)  # which nobody reads: to open it would block
    (tmp_path / "dangling").symlink_to(tmp_path / "target")
    check_writable(kept, pipe, tmp_path / "dangling", tmp_path / "new", None)
    assert kept.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["dangling", "kept", "pipe"]
    with pytest.raises(UsageError, match="it is a directory"):
        check_writable(tmp_path)
