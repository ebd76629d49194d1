import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

import tiered
from tiered.bytes.device.profile import LINK_PROFILE_NAME, PROFILE_NAME
from tiered.bytes.private_file import create_private_file
from tiered.errors import CorruptionError, DeviceError, UsageError
from tiered.store.catalog.catalog import Member
from tiered.store.lifetime import directory as directory_module
from tiered.store.lifetime import lock as lock_module
from tiered.store.lifetime.directory import CATALOG_NAME, Directories, Identity, scratch_directories
from tiered.store.lifetime.lock import Lock
from tiered.store.store import Store


def finish(directories):
    """What the store does next: the catalog, then data files."""
    os.close(create_private_file(directories.paths[0] / CATALOG_NAME))
    for path in directories.paths:
        os.close(create_private_file(path / "data-000"))


def make_store(*paths):
    with closing(Directories.open(paths)) as directories:
        assert directories.created
        finish(directories)
        return directories.store_uuid


def refused(paths, mode="a", *, match):
    before = snapshot(paths)
    with pytest.raises(UsageError, match=match):
        Directories.open(paths, mode)
    assert snapshot(paths) == before


def snapshot(paths):
    """Names, contents and permissions; the lock's pid may change."""
    found = {}
    for path in paths:
        for root, _, files in os.walk(path):
            found[root] = os.lstat(root).st_mode
            for name in files:
                if name != "lock":
                    full = os.path.join(root, name)
                    content = os.readlink(full) if os.path.islink(full) else Path(full).read_bytes()
                    found[full] = (os.lstat(full).st_mode, content)
    return found


@pytest.fixture
def two(tmp_path):
    return tmp_path / "a", tmp_path / "b"


# --- creation ---


def test_an_empty_directory_becomes_private(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "lost+found").mkdir()
    Directories.open([tmp_path]).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("profile", [PROFILE_NAME, LINK_PROFILE_NAME])
def test_a_profile_is_no_obstacle_and_stays(tmp_path, profile):
    for name in (profile, f"{profile}.12ab34cd"):  # the second is left by a write that was cut short
        (tmp_path / name).write_text("measured")
    for mode in "xax":  # creation, a creation that is done again, and one more
        Directories.open([tmp_path], mode).close()
    make_store(tmp_path)
    Directories.open([tmp_path]).close()
    for name in (profile, f"{profile}.12ab34cd"):
        assert (tmp_path / name).read_text() == "measured"
    (tmp_path.parent / f"scratch{profile}").mkdir()
    (tmp_path.parent / f"scratch{profile}" / profile).write_text("measured")
    scratch_directories([tmp_path.parent / f"scratch{profile}"])
    assert os.listdir(tmp_path.parent / f"scratch{profile}") == [profile]


def test_scratch_space_of_a_process_that_was_killed_is_no_obstacle(tmp_path):
    """It has a name for an instant where files cannot be made without; gc removes it."""
    (tmp_path / "scratch-0123456789abcdef").touch(0o600)
    for mode in "xax":
        Directories.open([tmp_path], mode).close()
    (tmp_path.parent / "other").mkdir()
    (tmp_path.parent / "other" / "scratch-me").touch(0o600)
    with pytest.raises(UsageError, match="holds 'scratch-me' and no store"):
        Directories.open([tmp_path.parent / "other"])


def test_a_store_opens_with_its_directories_in_any_order(two):
    store_uuid = make_store(*two)
    for paths in (two, two[::-1], [f"{two[1]}/", f"{two[0]}/../a"]):
        for mode in "ar":
            with closing(Directories.open(paths, mode)) as directories:
                assert directories.paths == two
                assert directories.store_uuid == store_uuid and not directories.created


def test_the_identity_file_is_as_documented(two):
    store_uuid = make_store(*two)
    fields = json.loads((two[1] / "identity").read_text())
    assert fields.keys() == {"format", "index", "number", "store", "digest"}
    assert (fields["format"], fields["index"], fields["number"], fields["store"]) == (1, 1, 2, store_uuid.hex())
    assert Identity(bytes(range(16)), 1, 3).encode().decode() == (
        '{"format": 1, "index": 1, "number": 3, "store": "000102030405060708090a0b0c0d0e0f", '
        '"digest": "a9feea672b7387d7"}\n'
    )


def test_a_link_to_a_directory_is_followed(tmp_path, two):
    make_store(*two)
    (tmp_path / "link").symlink_to(two[0])
    with closing(Directories.open([two[1], tmp_path / "link"])) as directories:
        assert directories.paths == two


# --- refusals; nothing is touched ---


def test_the_set_of_directories_must_be_the_stored_one(tmp_path, two):
    make_store(*two)
    other = tmp_path / "other"
    make_store(other)
    (tmp_path / "empty").mkdir()
    refused([two[0]], match=r"has 2 directories, got 1 with the numbers 1; missing: 2")
    refused([two[1]], match=r"numbers 2; missing: 1")
    refused([*two, tmp_path / "empty"], match="empty is empty")
    refused([*two, tmp_path / "missing"], match="missing is empty")
    refused([two[0], tmp_path / "empty"], match="empty is empty")
    refused([*two, other], match="other is directory 1 of 1 of store")
    refused([two[0], other], match="of store")
    refused([two[0], two[0]], match="given twice")
    assert not (tmp_path / "missing").exists()


def test_directories_that_are_too_many_are_left_out_or_a_new_store_has_all(tmp_path, two):
    third = tmp_path / "third"
    with Store(*two, dram="16MiB") as old:
        old["a"] = torch.arange(5000)
    with pytest.raises(UsageError, match=r"third is empty.*leave this one out, or copy the tensors.*store over all"):
        Store(*two, third, dram="16MiB")
    make_store(tmp_path / "foreign")
    refused([*two, tmp_path / "foreign"], match="leave it out")
    new_paths = [tmp_path / name for name in ("new 1", "new 2", "new 3")]
    with Store(*two, dram="16MiB", mode="r") as old, Store(*new_paths, dram="16MiB") as new:
        new.update(old)
        assert torch.equal(new["a"], torch.arange(5000))


COPIED = ("identity", CATALOG_NAME, "data-000")


@pytest.mark.parametrize("order", list(itertools.permutations(COPIED)), ids="-".join)
def test_a_copy_beside_a_writer_is_found_to_be_torn_and_gives_no_wrong_byte(tmp_path, order):
    source, copy = tmp_path / "run", tmp_path / "copy"
    copy.mkdir(mode=0o700)
    with Store(source, dram="16MiB") as store:
        for number, name in enumerate(order):
            for _ in range(2):  # the second is written over what the first has replaced
                store.update({key: torch.full((5000,), ord(key) + number) for key in "abc"})
                store.commit({"number": number})
            shutil.copy2(source / name, copy / name)
    with Store(copy, dram="16MiB", mode="r") as torn:
        for key in torn:
            with pytest.raises(CorruptionError, match=rf"'{key}'"):
                assert torch.equal(torn[key], torch.full((5000,), ord(key) + torn.state["number"]))


def test_a_copy_after_a_commit_with_no_later_write_is_whole(tmp_path):
    with Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = torch.arange(5000)
        store.commit({"step": 1})
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with Store(tmp_path / "copy", dram="16MiB") as copy:
        assert torch.equal(copy["a"], torch.arange(5000)) and copy.state == {"step": 1}


def test_a_copied_directory_is_refused(tmp_path, two):
    make_store(*two)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", two[0], copy], check=True)
    refused([*two, copy], match="missing: none, one is there twice")
    refused([two[0], copy], match="missing: 2")


def test_a_directory_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    refused([tmp_path], match=r"thesis\.tex")
    (tmp_path / "thesis.tex").unlink()
    (tmp_path / CATALOG_NAME).touch(0o600)
    refused([tmp_path], match=CATALOG_NAME)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "d", "a"), ("d/../a", "a/b")])
def test_directories_within_each_other_are_refused_and_none_is_made(tmp_path, names):
    with pytest.raises(UsageError, match=r"a/b(/c)? lies in .*/a, another directory of the store"):
        tiered.Store(*(tmp_path / name for name in names), dram="8MiB")
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a directory"):
        Directories.open([tmp_path / "file"])
    with pytest.raises(UsageError, match="not a directory"):
        scratch_directories([tmp_path / "file"])


def test_a_dangling_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="symbolic link"):
        Directories.open([tmp_path / "link"])
    assert not (tmp_path / "nowhere").exists()


def test_a_store_whose_files_came_back_with_other_permissions_has_one_refusal_and_its_way(tmp_path):
    path = tmp_path / "a run"
    make_store(path)
    for file in (path, *path.iterdir()):
        file.chmod(0o755 if file.is_dir() else 0o644)
    with pytest.raises(UsageError, match=r"can be reached by others, and so can .*lock") as caught:
        Directories.open([path])
    subprocess.run(str(caught.value)[str(caught.value).index("chmod ") :], shell=True, check=True)
    Directories.open([path]).close()


def test_damaged_identity_is_corruption(tmp_path):
    make_store(tmp_path)
    path = tmp_path / "identity"
    good = path.read_bytes()
    for i in range(len(good)):
        for bit in (1, 0x80):
            path.write_bytes(good[:i] + bytes([good[i] ^ bit]) + good[i + 1 :])
            with pytest.raises(CorruptionError) as caught:
                Directories.open([tmp_path])
            assert caught.value.file == str(path)
    for bad in (b"", good[:-1], b"[]", b"[" * 4000, b"{}", b"null", good + good, b"\xff" * 100_000):
        path.write_bytes(bad)
        with pytest.raises(CorruptionError):
            Directories.open([tmp_path])


def test_newer_identity_is_refused(tmp_path):
    make_store(tmp_path)
    fields = {"format": 3, "index": 0, "number": 1, "store": bytes(16).hex()}
    text = json.dumps({**fields, "digest": directory_module._digest(fields)})
    (tmp_path / "identity").write_text(text + "\n")
    refused([tmp_path], match="format version 3; this tiered reads versions 1 to 2")


@pytest.mark.parametrize("index, number", [(0, 1 << 40), (0, 2.5), (False, 2), (0, 0), (1, 1), (-1, 2)])
def test_numbers_that_no_store_has_are_corruption(tmp_path, index, number):
    make_store(tmp_path)
    (tmp_path / "identity").write_bytes(Identity(bytes(16), index, number).encode())
    with pytest.raises(CorruptionError, match="is damaged"):
        Directories.open([tmp_path])


@pytest.mark.parametrize("member", [Member(b"r", 0, 2), Member(bytes(16), 2, 2), Member(bytes(16), False, 2)])
def test_members_that_no_run_has_are_corruption(tmp_path, member):
    make_store(tmp_path)
    (tmp_path / "identity").write_bytes(Identity(bytes(16), 0, 1, member).encode())
    with pytest.raises(CorruptionError, match="is damaged"):
        Directories.open([tmp_path])


def test_an_identity_of_a_rank_comes_back_and_one_of_a_single_rank_has_the_bytes_of_format_1(tmp_path):
    identity = Identity(bytes(range(16)), 1, 3, Member(b"r" * 16, 3, 8))
    (tmp_path / "identity").write_bytes(identity.encode())
    assert Identity.read(tmp_path / "identity") == identity and str(identity.member) == "rank 3 of 8"
    assert json.loads(Identity(bytes(16), 0, 1).encode()) == {
        "format": 1, "index": 0, "number": 1, "store": bytes(16).hex(), "digest": "4b8ead7465de5130"
    }  # fmt: skip


# --- creations that were cut short ---


class CutShortError(Exception):
    pass


def test_creation_cut_short_anywhere_is_redone(tmp_path, monkeypatch):
    """Each call that changes something fails in turn, and another one in the second attempt; the third creates."""
    calls, fail_at = 0, 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise CutShortError
            return function(*arguments, **options)

        return call

    for module, name in (
        (directory_module, "fsync_directory"),
        (directory_module, "create_private_file"),
        (lock_module, "create_private_file"),
    ):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for name in ("rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # the order is at stake here, and drives are slow
    num_cut = 0
    for first in itertools.count(1):
        paths = [tmp_path / str(first) / name for name in "abc"]
        for attempt, call_to_fail in enumerate((first, 3 + first * 7 % 29)):
            calls, fail_at = 0, call_to_fail
            try:
                turned = attempt * (first % 2)  # in the same order, and in another one
                Directories.open(paths[turned:] + paths[:turned]).close()
            except CutShortError:
                num_cut += attempt == 0
        fail_at = 0
        with closing(Directories.open(paths)) as directories:
            assert directories.created and directories.paths == tuple(paths)
            finish(directories)
        with closing(Directories.open(paths)) as directories:
            assert not directories.created
        if num_cut < first:
            break
    assert num_cut > 20


def test_an_unfinished_creation_is_redone_in_every_writing_mode(tmp_path):
    Directories.open([tmp_path]).close()
    with pytest.raises(UsageError, match="no store"):
        Directories.open([tmp_path], "r")
    for mode in "xa":
        with closing(Directories.open([tmp_path], mode)) as directories:
            assert directories.created


def test_a_part_of_an_unfinished_creation_is_refused_where_the_catalog_may_be_elsewhere(two):
    Directories.open(two).close()
    refused([two[1]], match="missing: 1")
    with closing(Directories.open([two[0]])) as directories:
        assert directories.created


def test_data_without_a_catalog_is_never_thrown_away(two):
    make_store(*two)
    (two[0] / CATALOG_NAME).unlink()
    before = snapshot(two)
    with pytest.raises(CorruptionError, match="the catalog was lost"):
        Directories.open(two)
    assert snapshot(two) == before


# --- locks ---


def test_what_another_process_does_before_the_lock_is_ours_counts(tmp_path, monkeypatch):
    made = []

    def lock_late(path, *, shared):
        monkeypatch.setattr(directory_module, "Lock", Lock)
        made.append(make_store(path))
        return Lock(path, shared=shared)

    monkeypatch.setattr(directory_module, "Lock", lock_late)
    with closing(Directories.open([tmp_path / "run"])) as directories:
        assert not directories.created and [directories.store_uuid] == made


def test_a_second_opener_is_told_the_pid(two):
    make_store(*two)
    for first, second in ("aa", "ar", "ra", "ax"):
        with closing(Directories.open(two, first)):
            expected = "holds a store already" if second == "x" else f"open in process {os.getpid()}"
            refused(two, second, match=expected)
            refused(two[::-1], "a", match=f"open in process {os.getpid()}")
    with closing(Directories.open(two, "r")), closing(Directories.open(two, "r")):
        pass
    assert (two[0] / "lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_lock_that_was_removed_lets_no_second_writer_in(two, mode):
    """The identity is locked as well, in each directory: neither's `rm lock` is enough."""
    make_store(*two)
    for path in two:
        with closing(Directories.open(two, mode)) as directories:
            directories.check_locks()
            (path / "lock").unlink()
            with pytest.raises(UsageError, match=f"open in process {os.getpid()}"):
                Directories.open(two)
            with pytest.raises(DeviceError, match="lock was moved, or removed, while the store was open"):
                directories.check_locks()
        Directories.open(two).close()


@pytest.mark.parametrize("name", ["lock", "identity"])
def test_a_commit_says_that_a_file_that_kept_others_away_has_lost_its_name(tmp_path, name):
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = torch.ones(9)
    kept = (tmp_path / "run" / name).read_bytes()
    store = tiered.Store(tmp_path / "run", dram="16MiB")
    store["a"] = torch.zeros(9)
    (tmp_path / "run" / name).unlink()
    with pytest.raises(DeviceError, match=f"{name} was moved, or removed,.*end it, and open the store again"):
        store.commit()
    store.close(commit=False)
    os.close(create_private_file(tmp_path / "run" / name))
    (tmp_path / "run" / name).write_bytes(kept)
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        assert store.generation == 1 and store["a"].all()


def test_of_two_writers_that_no_lock_keeps_apart_one_is_refused(tmp_path):
    """As on a file system without locks: what one has acknowledged stays."""
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        store["a"] = torch.ones(9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcntl.flock", lambda fd, operation: None)
        first, second = (tiered.Store(tmp_path / "run", dram="16MiB") for _ in range(2))
        first["a"], second["a"] = torch.full((9,), 2.0), torch.full((9,), 3.0)
        assert first.commit() == 2
        with pytest.raises(DeviceError, match="generation 2 of another process, and not generation 1"):
            second.commit()
        first["a"] = torch.full((9,), 4.0)
        assert first.commit() == 3
        second.close(commit=False)
        first.close()
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        assert store.generation == 3 and (store["a"] == 4).all() and store.verify().is_clean


HOLD = """
import sys
from tiered.store.lifetime.directory import Directories
held = Directories.open(sys.argv[1:])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_dead_owners_lock_is_free(tmp_path):
    make_store(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        refused([tmp_path], match=f"open in process {process.pid}")
        process.kill()
        process.wait()
        with closing(Directories.open([tmp_path], "r")):
            refused([tmp_path], match=f"open in process {os.getpid()}")
        Directories.open([tmp_path]).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    directories = Directories.open([tmp_path])
    finish(directories)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.read(read_end, 1)  # lives on after the parent has closed the store
        os._exit(0 if [lock._fds for lock in directories._locks] == [{}] else 1)
    try:
        refused([tmp_path], match=f"open in process {os.getpid()}")
        directories.close()
        Directories.open([tmp_path]).close()
    finally:
        os.close(write_end)
        os.close(read_end)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- scratch ---


def test_scratch_directories_are_made_and_hold_no_store(tmp_path):
    assert scratch_directories([tmp_path / "new" / "a", tmp_path]) == (tmp_path / "new" / "a", tmp_path)
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == 0o700
    assert os.listdir(tmp_path / "new" / "a") == []
    make_store(tmp_path / "store")
    with pytest.raises(UsageError, match="holds a store"):
        scratch_directories([tmp_path / "store"])
