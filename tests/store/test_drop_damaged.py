"""Damaged committed keys that somebody names are dropped, in one commit; nothing else ever is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.store.rig import Counter, GatedStore, numbers
from tiered.errors import DeviceError, UsageError
from tiered.store.store import Store
from tiered.tools.cli import main
from tiered.units import KiB, MiB

DRAM = "16MiB"
NBYTES = 5 * MiB  # two blocks


@pytest.fixture
def run(quick_path: Path) -> Path:
    """A run of three tensors, state and something registered, of which "a" and "c" have a flipped bit."""
    with Store(quick_path / "run", dram=DRAM) as store:
        store.register("counter", Counter(7))
        store.put_many({name: numbers(NBYTES, seed) for seed, name in enumerate("abc")})
        store["inline"] = numbers(100)
        store.commit({"step": 3})
    for name in "ac":
        flip(quick_path / "run", name)
    return quick_path / "run"


def place(run: Path, name: str) -> int:
    with Store(run, dram=DRAM, mode="r") as store:
        return next(record.extents[0].offset for record in store.records() if record.name == name)


def flip(run: Path, name: str) -> None:
    offset = place(run, name) + 1000
    with open(run / "data-000", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def files(run: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in run.iterdir() if entry.name != "lock"}


def test_named_damaged_keys_go_and_all_else_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--drop", "a"]) == 1  # "c" is damaged still
    said = " ".join(capsys.readouterr().out.split())
    assert "dropped 'a': generation 2 is without them; still damaged: 'c'" in said
    with Store(run, dram=DRAM) as store:
        assert set(store) == {"b", "c", "inline"} and store.generation == 2
        assert torch.equal(store["b"], numbers(NBYTES, 1)) and torch.equal(store["inline"], numbers(100))
        counter = Counter()
        store.register("counter", counter)
        assert store.resume() == {"step": 3} and counter.count == 7
    assert main(["verify", str(run), "--drop", "c"]) == 0
    assert "still damaged: nothing" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 0


def test_several_keys_go_in_one_commit(run: Path) -> None:
    assert main(["verify", str(run), "--drop", "a", "--drop", "c", "--drop", "a"]) == 0
    with Store(run, dram=DRAM, mode="r") as store:
        assert set(store) == {"b", "inline"} and store.generation == 2


@pytest.mark.parametrize(
    ("drop", "says"),
    [
        (["b"], "'b' is not damaged"),
        (["inline"], "'inline' is not damaged"),
        (["a", "b"], "'b' is not damaged"),
        (["nobody"], "--drop 'nobody': the run has no such key"),
        (["a", "nobody"], "nothing was dropped"),
        (["../a"], "no such key"),
        ([""], "no such key"),
    ],
)
def test_nothing_is_dropped_where_one_key_is_sound_or_unknown(
    run: Path, drop: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert main(["verify", str(run), *(word for key in drop for word in ("--drop", key))]) == 2
    assert says in capsys.readouterr().err
    assert files(run) == before


def test_nothing_is_dropped_without_the_option(run: Path) -> None:
    before = files(run)
    assert main(["verify", str(run)]) == 1
    assert files(run) == before


def test_a_store_in_use_drops_nothing(run: Path) -> None:
    with Store(run, dram=DRAM, mode="r") as store, pytest.raises(UsageError, match="nothing can be written"):
        store.drop_damaged(["a"])
    with Store(run, dram=DRAM) as store:
        with pytest.raises(TypeError, match="several keys"):
            store.drop_damaged("a")
        with pytest.raises(UsageError, match="no key 'nobody'; nothing was dropped"):
            store.drop_damaged(["a", "nobody"])
        store.drop_damaged([])
        store["new"] = numbers(10)
        with pytest.raises(UsageError, match="open the store for this alone"):
            store.drop_damaged(["a"])
        store.rollback()
        store.register("counter", Counter())
        with pytest.raises(UsageError, match="something is registered"):
            store.drop_damaged(["a"])
        assert "a" in store and store.generation == 1
    with Store(tmp := run.parent / "swap", dram=DRAM, durable=False) as store, pytest.raises(UsageError):
        store.drop_damaged(["a"])
    assert not list(tmp.iterdir())


def damaged(gated: GatedStore) -> None:
    """Commit "a" and "b", damage "a", and open the store again."""
    gated.store.put_many({"a": numbers(12 * KiB), "b": numbers(12 * KiB, 1)})
    gated.store.commit()
    extent = next(record.extents[0] for record in gated.store.records() if record.name == "a")
    gated.close()
    gated.disk.image(extent.device, extent.file)[extent.offset] ^= 1
    gated.open()


def test_a_drop_whose_commit_fails_has_dropped_nothing(gated: GatedStore) -> None:
    damaged(gated)
    gated.catalog.failure = DeviceError("gone")
    with pytest.raises(DeviceError, match="was not committed"):
        gated.store.drop_damaged(["a"])
    gated.close()
    gated.open()
    assert set(gated.store) == {"a", "b"} and not gated.store.verify().is_clean
    gated.store.drop_damaged(["a"])
    assert set(gated.store) == {"b"} and gated.store.verify().is_clean
