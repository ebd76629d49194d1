"""Abuse: traps in the place of every file, loose permissions, keys that look like paths, and what a core dump holds.

The rule for names: files inside a store's directory are never followed through a link, opened under a second name or
waited for; outputs that the user names (--json, --timeline) may be links of his own and obey his umask.
A parent directory that others can write to is accepted, as /tmp is: what they put in the store's place belongs to
them, and is refused. Root may use a directory of another user, as containers do, and then trusts that user.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from tests.bytes.test_profile import PROFILE
from tests.store.rig import numbers
from tiered.bytes.arena import Arena
from tiered.bytes.device.profile import PROFILE_NAME, load_profile, write_profile
from tiered.errors import TieredError, UsageError
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import KiB, MiB

DRAM = "8MiB"
ROOT = Path(__file__).parents[2]

CATALOG = [f"catalog.db{end}" for end in ("", "-journal", "-wal", "-shm", ".new", ".new-journal")]
NAMES = ["lock", "identity", "identity.new", "ledger", *CATALOG, "data-000", "data-001"]


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def impatient() -> Iterator[None]:
    """Fail what waits for a FIFO that nobody opens, instead of hanging."""

    def on_alarm(number: int, frame: object) -> None:
        raise AssertionError("it waits for a FIFO")

    old = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def use(directory: Path, nbytes: int = 100 * KiB) -> None:
    """Open the store and let it make every file it can make; data files only for more than 1 KiB."""
    with Store(directory, dram=DRAM, engine="threads") as store:
        store["a"] = numbers(nbytes)
        store.commit({"step": 1})


def loose(path: Path, victim: Path) -> None:
    path.write_bytes(b"loose")
    path.chmod(0o666)


def bound(path: Path, victim: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)  # bind() takes 108 bytes of a path at most


TRAPS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("nowhere")),
    "second name": lambda path, victim: os.link(victim, path),
    "FIFO": lambda path, victim: os.mkfifo(path, 0o600),
    "directory": lambda path, victim: path.mkdir(mode=0o700),
    "socket": bound,
    "loose file": loose,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("made") / "run"
    use(run)
    return run


def assert_victim_is_well(victim: Path) -> None:
    assert victim.read_bytes() == b"precious" and stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert not victim.with_name("nowhere").exists()


def copy_store(made: Path, run: Path) -> None:
    run.mkdir(mode=0o700)
    for file in made.iterdir():
        fd = os.open(run / file.name, os.O_CREAT | os.O_RDWR, 0o600)
        with open(fd, "wb") as copied, open(file, "rb") as original:
            copied.write(original.read(MiB))  # more than is used of the data
            copied.truncate(file.stat().st_size)


def assert_trap_is_refused_or_replaced(run: Path, name: str, trap: str, victim: Path) -> None:
    path = run / name
    path.unlink(missing_ok=True)
    TRAPS[trap](path, victim)
    before = os.lstat(path)
    with impatient():
        try:
            use(run, 100 * KiB if name.startswith("data") else 100)
        except TieredError as error:
            assert name in str(error), f"{error!r} does not say what is in the way"
        else:
            now = os.lstat(path) if os.path.lexists(path) else None
            is_ours = now is None or (stat.S_ISREG(now.st_mode) and now.st_nlink == 1 and not now.st_mode & 0o077)
            assert is_ours or (".new" in name and now == before), f"{path}, a {trap}, was taken for a file"
        if ".new" in name:
            assert main(["gc", str(run), "--yes"]) in (0, 2)
    assert_victim_is_well(victim)


@pytest.mark.parametrize(  # each name with three traps, each trap with five names or more
    ("name", "trap"), [(name, [*TRAPS][(i + shift) % 7]) for i, name in enumerate(NAMES) for shift in (0, 2, 3)]
)
def test_a_trap_is_refused_or_replaced_never_used(name: str, trap: str, made: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    (tmp_path / "empty").mkdir(mode=0o700)
    copy_store(made, tmp_path / "full")
    for run in (tmp_path / "empty", tmp_path / "full"):
        assert_trap_is_refused_or_replaced(run, name, trap, victim)


@pytest.mark.parametrize("trap", ["link", "second name", "FIFO"])
@pytest.mark.parametrize("name", ["catalog.db", "catalog.db-journal", "ledger"])
def test_who_only_looks_is_not_trapped_either(name: str, trap: str, made: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    copy_store(made, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    TRAPS[trap](tmp_path / "run" / name, victim)
    with impatient():
        assert main(["inspect", str(tmp_path / "run")]) == 2
        assert main(["verify", str(tmp_path / "run")]) == 2
    assert_victim_is_well(victim)


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_in_the_place_of_the_profile_is_passed_over_and_replaced(trap: str, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / PROFILE_NAME
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    TRAPS[trap](path, victim)
    with impatient():
        assert load_profile(tmp_path) is None
        if trap == "directory":
            with pytest.raises(TieredError, match="cannot write"):
                write_profile(tmp_path, PROFILE)
        else:
            write_profile(tmp_path, PROFILE)
            assert load_profile(tmp_path) == PROFILE
    assert_victim_is_well(victim)
    assert not list(tmp_path.glob(f"{PROFILE_NAME}.*"))


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_everything_that_is_made_is_its_owners_alone(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        use(tmp_path / "new" / "run")
        for directory in ("one", "two"):
            (tmp_path / "new" / directory).mkdir()
            (tmp_path / "new" / directory).chmod(0o755)
        with Store(tmp_path / "new" / "one", tmp_path / "new" / "two", dram=DRAM) as store:
            store["a"] = numbers(5 * MiB)
        with Store(tmp_path / "new" / "swap", dram=DRAM, durable=False) as store:
            store["a"] = numbers(5 * MiB)
        write_profile(tmp_path / "new" / "swap", PROFILE)
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert len(found) > 12
    for path, mode in found.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_outputs_that_the_user_names_may_be_links_of_his_own(tmp_path: Path) -> None:
    use(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "report.json")
    assert main(["gc", str(tmp_path / "run"), "--dry-run", "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "report.json").exists()


@pytest.mark.parametrize("mode", [0o1777, 0o777])
def test_a_parent_that_others_can_write_to(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is made and private; what somebody else puts in its place is his, and refused."""
    tmp_path.chmod(mode)
    use(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    before = sorted(entry.name for entry in (tmp_path / "run").iterdir())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    with pytest.raises(UsageError, match="belongs to user"):
        Store(tmp_path / "run", dram=DRAM)
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == before


KEYS = ["../x", "/etc/passwd", ".", "", "a\0b", "x" * 10_000, "schön/日本 🜁", "\ud800", "\x1b[2J", "lock", "data-000"]


def test_keys_are_rows_and_never_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path / "run", dram=DRAM) as store:
        for seed, key in enumerate(KEYS):
            store[key] = numbers(2000, seed)
        store.commit()
    with Store(tmp_path / "run", dram=DRAM) as store:
        assert set(store) == set(KEYS)
        assert all(torch.equal(store[key], numbers(2000, seed)) for seed, key in enumerate(KEYS))
        del store["../x"]
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == [
        "catalog.db", "catalog.db-journal", "data-000", "identity", "ledger", "lock", "run",
    ]  # fmt: skip
    assert main(["inspect", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "'\\x1b[2J'" in said and "\x1b" not in said and "\0" not in said
    assert max(map(len, said.splitlines())) < 300


@pytest.mark.parametrize("key", [None, 3, b"bytes", ("a",), Path("a")])
def test_a_key_that_is_no_text_is_refused(key: object, tmp_path: Path) -> None:
    with Store(engine="memory", dram=DRAM) as store:
        with pytest.raises(TypeError, match="key"):
            store[key] = numbers(10)  # type: ignore[index]
        with pytest.raises(TypeError, match="key"):
            store.put_many({key: numbers(5000)})  # type: ignore[dict-item]
        assert len(store) == 0


def test_a_core_dump_holds_no_tensor() -> None:
    """The arena is marked MADV_DONTDUMP, all of it: "dd" in the flags of its mappings."""
    with closing(Arena(16 * MiB)) as arena:
        whole = arena.allocate_nowait(arena.nbytes)
        assert whole is not None
        first = torch.frombuffer(whole.memory, dtype=torch.uint8).data_ptr()
        flags: dict[int, list[str]] = {}
        start = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(word, 16) for word in head.split("-"))
                is_ours = start < first + arena.nbytes and first < end
            elif head == "VmFlags:" and is_ours:
                flags[start] = line.split()[1:]
        arena.release(whole)
    assert flags and all("dd" in found for found in flags.values())


def test_the_check_of_the_source_sees_seeded_violations(tmp_path: Path) -> None:
    """What scripts/check runs, over a package with a bad line in each file."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tiered").mkdir()
    shutil.copy(ROOT / "tests/test_names.py", tmp_path / "tests")
    lines = ("import pickle", "from pickle import loads", "x = torch.load('f')", "torch.save(1, 'f')")
    for name, line in zip("abcd", lines, strict=True):
        (tmp_path / "tiered" / f"{name}.py").write_text(f'"""A row."""\n\n__all__: list[str] = []\n{line}\n')
    command = [sys.executable, "-m", "pytest", "-vv", "-pno:cacheprovider", "-k", "forbidden", "tests/test_names.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    assert [name for name in "abcd" if f"tiered/{name}.py:1: " not in done.stdout] == [], done.stdout
    assert "tests/test_names.py" in (ROOT / "scripts/check").read_text()
