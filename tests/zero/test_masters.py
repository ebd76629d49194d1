"""The fp32 values of bf16 parameters between ``shard`` and the optimizer are right after any change."""

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.zero.training import debug_store
from tiered.errors import CapacityError, StepAbandonedError, StoreLostError
from tiered.store.residency.residency import Lease
from tiered.units import MiB

WIDTH = 200
STATE = {"exact": 10.0, "compact": 3.2}
"""Bytes of state beside a bf16 parameter: two moments, the rest of the master."""


def net(width: int = WIDTH, num_blocks: int = 3, seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(num_blocks)))


def sharded(store: tiered.Store) -> nn.Module:
    with tiered.construct(store):
        model = net()
    return tiered.shard(model, store, param_dtype=torch.bfloat16)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """Make an optimizer of ``model``, and return its masters by parameter name."""
    state = tiered.AdamW(model.parameters()).state_dict()["state"]
    return {name: state[index]["master"] for index, (name, _) in enumerate(model.named_parameters())}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def load_fp32(model: nn.Module) -> dict[str, Tensor]:
    values = net(seed=6).state_dict()
    model.load_state_dict(values)
    return values


def load_bf16(model: nn.Module) -> dict[str, Tensor]:
    values = {name: value.bfloat16() for name, value in net(seed=6).state_dict().items()}
    model.load_state_dict(values)
    return {name: value.float() for name, value in values.items()}


def load_one(model: nn.Module) -> dict[str, Tensor]:
    values = net().state_dict() | {"1.0.weight": net(seed=6).state_dict()["1.0.weight"]}
    model.load_state_dict({"1.0.weight": values["1.0.weight"]}, strict=False)
    return values


def write_in_place(model: nn.Module) -> dict[str, Tensor]:
    values = {name: value.clone() for name, value in net().state_dict().items()}
    with tiered.unsharded(model), torch.no_grad():
        model.get_parameter("2.0.weight").mul_(3.0)
    values["2.0.weight"] = values["2.0.weight"].bfloat16().mul_(3.0).float()
    return values


def change_nothing(model: nn.Module) -> dict[str, Tensor]:
    return net().state_dict()


def load_otherwise(model: nn.Module) -> dict[str, Tensor]:
    """Load by other writes than a copy, as modules with a load of their own may."""
    values = net(seed=6).state_dict()

    def load(module: nn.Linear, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        with torch.no_grad():
            module.weight.copy_(state[prefix + "weight"])
            module.weight.add_(state[prefix + "weight"] / 300)
            module.bias.fill_(0.3)

    linear = model.get_submodule("1.0")
    linear._load_from_state_dict = types.MethodType(load, linear)
    model.load_state_dict(values)
    weight = values["1.0.weight"]
    values["1.0.weight"] = weight.bfloat16().add_(weight / 300).float()
    values["1.0.bias"] = torch.full((WIDTH,), 0.3, dtype=torch.bfloat16).float()
    return values


CHANGES = [load_fp32, load_bf16, load_one, load_otherwise, write_in_place, change_nothing]


@pytest.mark.parametrize("change", CHANGES)
def test_an_optimizer_takes_the_values_that_parameters_have_now(
    change: Callable[[nn.Module], dict[str, Tensor]], tmp_path: Path
) -> None:
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        expected = change(model)
        assert_equal(masters(model), expected)
        assert not any(record.name.startswith("model/master") for record in store.records())


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_without_an_optimizer_has_the_masters(
    change: Callable[[nn.Module], dict[str, Tensor]], tmp_path: Path
) -> None:
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        expected = change(model)
        if change is load_fp32:
            store.commit()  # order: the next change is made to what a commit has, and the close commits it
            expected = load_bf16(model)
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        store.resume()
        assert_equal(masters(model), expected)


@pytest.mark.parametrize("change", CHANGES[:-1])
def test_a_rollback_brings_the_masters_back(change: Callable[[nn.Module], dict[str, Tensor]], tmp_path: Path) -> None:
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        store.commit()
        change(model)
        store.rollback()
        assert_equal(masters(model), net().state_dict())


def test_an_optimizer_that_cannot_be_kept_takes_no_masters(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        with pytest.raises(TypeError, match="note"):
            tiered.AdamW([{"params": list(model.parameters()), "note": object()}])
        assert_equal(masters(model), net().state_dict())


def fail_to_make(model: nn.Module, store: tiered.Store) -> None:
    """Have an optimizer fail when some of its state is made and the masters that became it are deleted."""
    states: list[str] = []

    def leave_no_room(key: str, mode: str) -> Lease:
        states.extend([key] if key.startswith("model/state/") else [])
        if len(states) > 12:
            raise CapacityError("no room")
        return lease(key, mode)

    lease = store.working_set.lease
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.working_set, "lease", leave_no_room)
        with pytest.raises(CapacityError, match="no room"):
            tiered.AdamW(model.parameters())


def test_an_optimizer_that_failed_halfway_can_be_made_after_a_rollback(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store") as store:
        model = sharded(store)
        store.commit()
        fail_to_make(model, store)
        with pytest.raises(StepAbandonedError, match=r"has used up fp32 masters.*rollback"):
            tiered.AdamW(model.parameters())
        with pytest.raises(StepAbandonedError, match="masters"):
            store.commit()
        store.rollback()
        assert_equal(masters(model), net().state_dict())


def test_an_optimizer_that_failed_halfway_is_not_made_again_without_masters(tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", durable=False) as store:
        model = sharded(store)
        fail_to_make(model, store)
        with pytest.raises(StoreLostError, match="has used up fp32 masters"):
            tiered.AdamW(model.parameters())


def test_strides_and_dtypes_of_a_constructor_are_kept(tmp_path: Path) -> None:
    def make() -> nn.Module:
        module = net(num_blocks=1)
        linear = module[0][0]  # type: ignore[index]
        linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        linear.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
        return module

    expected = {name: value.float() for name, value in make().state_dict().items()}
    with debug_store(tmp_path / "store") as store:
        with tiered.construct(store):
            model = make()
        assert_equal(masters(tiered.shard(model, store, param_dtype=torch.bfloat16)), expected)


@pytest.mark.parametrize("state", STATE)
def test_a_constructed_model_is_written_once_with_its_masters_and_its_state(state: str, tmp_path: Path) -> None:
    with debug_store(tmp_path / "store", 8 * MiB) as store:  # of 2.4 M parameters, no kind of whose bytes fits
        with tiered.construct(store):
            model = net(width=512, num_blocks=9)
        numel = sum(parameter.numel() for parameter in model.parameters())
        model = tiered.shard(model, store, param_dtype=torch.bfloat16, hold=0)
        tiered.AdamW(model.parameters(), state=state)
        store.commit()
        written = store.statistics().write_bytes
        assert written <= numel * (4 + 4 + 2 + STATE[state]) * 1.02
        assert written >= numel * (2 + STATE[state]) * 0.98
