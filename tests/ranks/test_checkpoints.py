"""torch.distributed.checkpoint over ranks: saved by some, loaded by others, to and from plain torch and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import tiered
from tests.ranks.checkpoints import places
from tests.ranks.processes import Ranks, StartedRanks
from tests.ranks.training import ZOO, digests_of
from tests.reference import Trained
from tests.rigs.warm_python import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which no_dist=True says, too


@pytest.fixture(scope="module")
def ranks(warm_python: WarmPython) -> Iterator[Ranks]:
    with StartedRanks(3, warm_python.executable, limit_s=240.0, cases=("checkpoints",)) as ranks:
        yield ranks


def run(ranks: Ranks, world: int, tmp_path: Path, *, loads: bool, **options: Any) -> list[Any]:
    path, folder = str(tmp_path / f"{world} {loads}"), str(tmp_path / "checkpoint")
    return ranks.run("checkpoint", world=world, path=path, folder=folder, loads=loads, **options)[:world]


@pytest.mark.parametrize(
    ("worlds", "options"),
    [
        ((2, 2, 3), {"model": "odd_sizes", "dtype": "bf16"}),
        ((3, 1), {"model": "cnn_channels_last", "dtype": "fp32"}),
        ((1, 3), {"model": "hollow", "dtype": "fp32"}),
        ((2, 3), {"model": "tied_head", "dtype": "bf16", "state": "compact"}),
        ((3, 2), {"model": "gpt", "dtype": "bf16", "master_weights": True}),
    ],
)
def test_other_ranks_load_what_was_saved(
    worlds: tuple[int, ...], options: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    saved = run(ranks, worlds[0], tmp_path, loads=False, **options)
    for world in worlds[1:]:
        loaded = run(ranks, world, tmp_path, loads=True, **options)
        assert all(each["there"] == saved[0]["there"] for each in loaded)
        if world == worlds[0]:
            assert all(each["after"] == saved[0]["after"] for each in loaded), "and goes on with the same bits"
        assert all(each["moved"] < 1000 for each in [*saved, *loaded]), "buffers of rank 0, and no parameter"


def test_tiered_and_fsdp2_load_what_the_other_has_saved(ranks: Ranks, tmp_path: Path) -> None:
    folder, back = str(tmp_path / "fsdp2"), str(tmp_path / "tiered")
    saved = ranks.run("fsdp2", world=2, folder=folder, loads=False, model="gpt")[0]
    with tiered.Store(tmp_path / "run", dram="64MiB") as store:
        model = tiered.shard(ZOO["gpt"].build(), store)
        optimizer = tiered.AdamW(model.parameters(), lr=0.5)
        with tiered.sharded_state_dict(model, optimizer, mode="rw") as state_dicts:
            dcp.load(places(*state_dicts), checkpoint_id=folder, no_dist=True)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        state, values = optimizer.state_dict()["state"], model.state_dict()
        found = {f"parameters {name}": value for name, value in values.items()}
        for index, (name, _) in enumerate(model.named_parameters()):
            found |= {f"{kind} {name}": state[index][kind] for kind in ("exp_avg", "exp_avg_sq")}
            assert state[index]["step"] == 2
        assert {key: value.flatten().tolist() for key, value in found.items()} == saved
        with tiered.sharded_state_dict(model, optimizer) as state_dicts:
            dcp.save(places(*state_dicts), checkpoint_id=back, no_dist=True)
    loaded = ranks.run("fsdp2", world=3, folder=back, loads=True, model="gpt", num_steps=1)
    assert loaded[:3] == [saved] * 3


def test_plain_torch_loads_what_ranks_have_saved(ranks: Ranks, tmp_path: Path) -> None:
    saved = run(ranks, 2, tmp_path, loads=False, model="odd_sizes", dtype="fp32")[0]["there"]
    net = ZOO["odd_sizes"].build()
    model, optimizer = get_state_dict(net, torch.optim.AdamW(net.parameters(), fused=True))
    dcp.load(places(model, optimizer), checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    moments = {
        kind: {name: kinds[kind] for name, kinds in optimizer["state"].items()} for kind in ("exp_avg", "exp_avg_sq")
    }
    counts = {name: int(kinds["step"]) for name, kinds in optimizer["state"].items()}
    assert digests_of(Trained(parameters=model, num_updates=counts, **moments)) == saved


def test_what_is_refused_changes_nothing_on_any_rank(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("refused", path=str(tmp_path / "run"), folder=str(tmp_path / "none"), world=3)
    for each in found:
        assert each["same"]
        load, alone, mode = each["said"]
        assert load.startswith("CheckpointException")
        assert "ZeroDivisionError: of rank 1" in alone
        assert "tiered.sharded_state_dict: the ranks differ" in mode and "expected the same call on all ranks" in mode
    assert found[0]["after"] == found[1]["after"] == found[2]["after"], "and training goes on"
