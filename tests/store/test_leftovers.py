"""`tiered gc` removes what crashes leave, and touches nothing that it cannot prove to be that."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.rigs.warm_python import WarmPython
from tests.store.rig import numbers
from tiered.bytes.device.profile import LINK_PROFILE_NAME, PROFILE_NAME
from tiered.errors import CorruptionError, UsageError
from tiered.store.lifetime.directory import Directories
from tiered.store.lifetime.leftovers import Leftovers
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import MiB

DRAM = "16MiB"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one tensor of 5 MiB in a data file that has grown to 64 MiB."""
    with Store(tmp_path / "run", dram=DRAM) as store:
        store["a"] = numbers(5 * MiB)
        store.commit({"step": 1})
    return tmp_path / "run"


def plant(path: Path, content: bytes = b"x" * 5000, *, mode: int = 0o600, age_s: float = 3600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return path


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Return mode and size of everything below ``root``, without the locks' content."""
    found = {}
    for entry in root.rglob("*"):
        status = os.lstat(entry)
        found[str(entry)] = (status.st_mode, 0 if entry.name == "lock" else status.st_size)
    return found


def assert_sound(run: Path) -> None:
    with Store(run, dram=DRAM) as store:
        assert torch.equal(store["a"], numbers(5 * MiB)) and store.state == {"step": 1} and store.verify().is_clean
        store["b"] = numbers(5 * MiB, 1)  # space is found anew
        store.commit({"step": 1})
        assert store.verify().is_clean


LEFT = (
    "identity.new", "catalog.db.new", "catalog.db.new-journal", f"{PROFILE_NAME}.0123abcd",
    f"{LINK_PROFILE_NAME}.0123abcd", "scratch-" + "0f" * 8,
)  # fmt: skip


def test_leftovers_go_and_the_run_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in LEFT:
        plant(run / name)
    os.close(os.open(run / "data-007", os.O_CREAT | os.O_RDWR, 0o600))
    report = run.parent / "report.json"
    assert main(["gc", str(run), "--yes", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    found = json.loads(report.read_text())
    names = {Path(item["path"]).name for item in found["leftovers"]}
    assert names == {*LEFT, "data-000", "data-007"} and all(name in said for name in names)
    assert found["freed_bytes"] == 59 * MiB + len(LEFT) * 8192 and not found["left_alone"]
    assert f"({found['freed_bytes']:,} bytes)" in said
    assert {entry.name for entry in run.iterdir()} == {
        "lock",
        "identity",
        "catalog.db",
        "catalog.db-journal",
        "data-000",
        "ledger",
    }
    assert (run / "data-000").stat().st_size == 5 * MiB
    assert_sound(run)


def test_a_dry_run_and_a_refusal_remove_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(run / "identity.new")
    before = snapshot(run)
    assert main(["gc", str(run), "--dry-run"]) == 0
    assert "would be freed; nothing was removed" in capsys.readouterr().out
    assert main(["gc", str(run)]) == 2
    assert "there is no terminal to ask on: add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["gc", str(run)]) == 2
    assert main(["gc", str(run), "--yes", "--json", str(run)]) == 2
    assert snapshot(run) == before
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["gc", str(run)]) == 0
    assert not (run / "identity.new").exists()
    assert main(["gc", str(run)]) == 0
    assert "nothing is left over" in capsys.readouterr().out


def test_what_is_not_provably_ours_is_left_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gc", str(run), "--yes"])
    victim = plant(tmp_path / "victim")
    strangers = (
        "notes.txt",
        "data-1",
        "data-0001",
        "catalog.db.old",
        "identity.new~",
        f"{PROFILE_NAME}.mine",
        "scratch-me",
    )
    for name in strangers:
        plant(run / name)
    (run / "identity.new").symlink_to(victim)
    (run / "data-005").symlink_to(victim)
    os.link(victim, run / "catalog.db.new")
    plant(run / "catalog.db.new-journal", mode=0o644)
    plant(run / f"{PROFILE_NAME}.0123abcd", age_s=0)  # a bench may be writing it now
    os.mkfifo(run / "data-004", 0o600)
    (run / "scratch-0123456789abcdef").mkdir(mode=0o700)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="must be a regular file of your own"):  # as a store would: it is no store's
        Leftovers([run])
    (run / "data-004").unlink()
    (run / "data-005").unlink()
    del before[str(run / "data-004")], before[str(run / "data-005")]
    assert main(["gc", str(run), "--yes"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert snapshot(tmp_path) == before
    for name in ("identity.new", "catalog.db.new", "catalog.db.new-journal", "scratch-0123456789abcdef"):
        assert f"left alone: {run / name}" in said
    assert "may be in use" in said


def test_a_store_that_is_open_is_refused_with_the_owners_pid(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(run / "identity.new")
    before = snapshot(run)
    for mode in ("a", "r"):
        with Store(run, dram=DRAM, mode=mode):
            assert main(["gc", str(run), "--yes"]) == 2
            assert f"is open in process {os.getpid()}" in capsys.readouterr().err
    with closing(Leftovers([run])), pytest.raises(UsageError, match="is open in process"):
        Store(run, dram=DRAM)
    assert snapshot(run) == before


def test_a_creation_that_was_cut_short_goes_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    Directories.open(paths).close()  # and never came to a catalog
    plant(paths[0] / "catalog.db.new")
    plant(paths[0] / "ledger")  # of a store whose catalog was removed
    plant(paths[1] / "notes.txt")
    assert main(["gc", str(paths[0]), "--yes"]) == 0  # the first is known to be of nothing finished
    assert not list(paths[0].iterdir())
    # The second may be a part of a store elsewhere.
    with pytest.raises(UsageError, match="with the numbers 2; missing: 1"):
        Leftovers([paths[1]])


def test_every_directory_of_a_striped_run_is_cleaned(tmp_path: Path) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    with Store(*paths, dram=DRAM) as store:
        store["a"] = numbers(12 * MiB)
        store.commit()
    sizes = [sum(file.stat().st_size for file in path.glob("data-*")) for path in paths]
    with pytest.raises(UsageError, match="has 2 directories"):
        Leftovers(paths[:1])
    with closing(Leftovers(list(reversed(paths)))) as found:
        assert {item.path.parent for item in found.items} == set(paths)
        assert found.nbytes == sum(sizes) - 12 * MiB == found.remove()
    with Store(*paths, dram=DRAM) as store:
        assert torch.equal(store["a"], numbers(12 * MiB)) and store.verify().is_clean


def test_catalog_and_data_that_do_not_belong_together_are_not_cleaned(run: Path) -> None:
    plant(run / "identity.new")
    os.truncate(run / "data-000", 4 * MiB)
    with pytest.raises(CorruptionError, match="nothing was removed") as caught:
        Leftovers([run])
    assert caught.value.file == str(run / "data-000") and (run / "identity.new").exists()


def test_what_changes_after_the_look_is_spared(run: Path) -> None:
    plant(run / "identity.new")
    plant(run / "catalog.db.new")
    with closing(Leftovers([run])) as found:
        (run / "identity.new").write_bytes(b"another")
        (run / "catalog.db.new").unlink()
        with open(run / "data-000", "ab") as file:
            file.write(b"longer")
        assert found.remove() == 0
        assert len(found.spared) == 3
    assert (run / "identity.new").exists()


def test_what_a_killed_bench_was_measuring_goes(tmp_path: Path) -> None:
    folder, busy, foreign, empty = (tmp_path / f".tiered-bench-{name * 8}" for name in "abcd")
    for path in (folder, busy, foreign):
        Store(path, dram=DRAM).close()
    (foreign / "notes.txt").write_text("mine")
    empty.mkdir(mode=0o700)
    (tmp_path / ".tiered-bench-eeeeeeee").symlink_to(foreign)
    with closing(Directories.open([busy])), closing(Leftovers([tmp_path])) as found:
        found.remove()
        assert {spared.split(":")[0] for spared in found.spared} == {
            str(busy), str(foreign), str(tmp_path / ".tiered-bench-eeeeeeee"),
        }  # fmt: skip
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["b", "c", "e"]
    assert sorted(entry.name for entry in foreign.iterdir()) == [
        "catalog.db", "catalog.db-journal", "identity", "ledger", "lock", "notes.txt",
    ]  # fmt: skip


def test_a_killed_process_leaves_what_gc_gives_back(run: Path, warm_python: WarmPython) -> None:
    """Swapped bytes that no commit has, in files that grew for them."""
    code = (
        "import os, sys, signal, torch, tiered\n"
        "store = tiered.Store(sys.argv[1], dram='16MiB')\n"
        "store['b'] = torch.ones(100 << 20, dtype=torch.uint8)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([warm_python.executable, "-c", code, str(run)], timeout=60).returncode == -9
    assert (run / "data-000").stat().st_size > 100 * MiB
    assert main(["gc", str(run), "--yes"]) == 0
    assert (run / "data-000").stat().st_size == 5 * MiB
    assert stat.S_IMODE((run / "data-000").stat().st_mode) == 0o600
    assert_sound(run)
