"""Three tiers: the bits of plain PyTorch in memory on the same device, within both budgets, and nobody waits."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.models import CASES, Case
from tests.reference import Recipe
from tests.zero.training import assert_same, budget_named_in, reference, start
from tiered.bytes.pinned_arena import PinnedArena, registrar_for
from tiered.errors import CapacityError, UsageError
from tiered.tiers import copies
from tiered.zero.activations import swapped_activations

pytestmark = [  # of torch itself on a device whose operators are the CPU's
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]

BF16 = torch.bfloat16

ROWS: list[tuple[str, torch.dtype | None, str, str, str, bool, int, float | None]] = [
    # case, param_dtype, update, update_on, activations, whether the device has the smallest budget, micro-steps, clip
    ("gpt", None, "step", "cpu", "keep", False, 1, 0.5),
    ("gpt", BF16, "step", "device", "swap", True, 3, 0.5),
    ("gpt", BF16, "backward", "cpu", "recompute", True, 1, None),
    ("gpt", None, "backward", "device", "swap", False, 1, None),
    ("tied_head", None, "step", "device", "recompute", True, 2, None),
    ("tied_functional", BF16, "backward", "cpu", "keep", False, 1, None),
    ("checkpoint_around_reentrant", None, "backward", "cpu", "keep", True, 1, None),
    ("checkpoint_inside", BF16, "step", "device", "keep", False, 1, 0.5),
    ("cnn", None, "step", "cpu", "swap", True, 2, 0.5),
    ("cnn", BF16, "backward", "device", "keep", False, 1, None),
    ("cnn_channels_last", None, "step", "device", "keep", True, 1, None),
    ("lstm", None, "step", "device", "keep", True, 1, 0.5),
    ("gru", BF16, "step", "cpu", "swap", False, 2, None),
    ("data_dependent_order", None, "backward", "device", "recompute", True, 1, None),
    ("data_dependent_order", BF16, "step", "cpu", "keep", True, 1, 0.5),
    ("called_twice", None, "backward", "cpu", "swap", True, 1, None),
    ("nested_units", BF16, "step", "cpu", "recompute", True, 1, 0.5),
    ("units_of_one_layer", None, "step", "cpu", "keep", True, 2, None),
    ("output_is_view_of_weight", None, "step", "device", "swap", True, 1, None),
    ("penalty_in_loop", None, "step", "cpu", "keep", True, 1, None),
    ("mixed_dtypes", None, "backward", "device", "keep", True, 1, None),
    ("odd_sizes", BF16, "backward", "device", "swap", True, 1, None),
    ("frozen_part", BF16, "step", "device", "recompute", False, 2, None),
    ("unused_parameter", None, "step", "cpu", "keep", True, 1, 0.5),
]


@pytest.fixture(autouse=True)
def small_ones_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of any size are swapped."""
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_bits(row: Any, accelerator: Any, tmp_path: Path) -> None:
    name, dtype, update, update_on, activations, is_tight, num_micro_steps, max_norm = row
    recipe = Recipe(param_dtype=dtype, num_steps=3, num_micro_steps=num_micro_steps, max_norm=max_norm)
    expected = reference_on(DEVICE, name, recipe, update_on)
    options = {"device": DEVICE, "update_on": update_on, "activations": activations}
    budget = ROOMY_NBYTES
    if is_tight:
        budget = smallest_device_memory(name, recipe, tmp_path / "refused", **options)
        if name == "output_is_view_of_weight":  # views that the modules hand on keep the buffers of their units
            budget += 2 * 4096
        options["hold"] = 0
    accelerator.reset()
    accelerator.set_query_delay(2)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = start(case_on(DEVICE, name), recipe, store, update, **options)
        trained = session.run()
        tier = next(session.model.parameters()).segment.unit.tier  # type: ignore[attr-defined]
        assert tier.memory.peak_bytes <= budget
        assert store.working_set.arena.is_pinned
    assert_same(trained, expected)


@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_reference_that_is_updated_on_the_cpu_has_the_same_bits_here(dtype: Any, sim: ModuleType) -> None:
    recipe = Recipe(param_dtype=dtype, max_norm=0.5)
    there = reference(case_on("sim", "gpt"), replace(recipe, updates_on="cpu"))
    assert next(iter(there.masters.values())).device.type == "cpu"
    expected = reference_on("sim", "gpt", recipe)
    there.masters = {name: master for name, master in there.masters.items() if name in expected.cast}
    assert_same(there, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_distributed_checkpoint_has_and_brings_the_values_of_a_device(
    update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    recipe = Recipe(param_dtype=BF16, num_steps=4)
    expected = reference_on(DEVICE, "odd_sizes", recipe, update_on)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "odd_sizes"), recipe, store, "step", device=DEVICE, update_on=update_on)
        for step in (0, 1):
            session.run_step(step)
        with tiered.sharded_state_dict(session.model, session.optimizer) as state_dicts:
            dcp.save(dict(enumerate(state_dicts)), checkpoint_id=tmp_path / "saved", no_dist=True)
        schedule = session.scheduler.state_dict() if session.scheduler is not None else None
        for step in (2, 3):
            session.run_step(step)
        with tiered.sharded_state_dict(session.model, session.optimizer, mode="rw") as state_dicts:
            dcp.load(dict(enumerate(state_dicts)), checkpoint_id=tmp_path / "saved", no_dist=True)
        if session.scheduler is not None:
            session.scheduler.load_state_dict(schedule)
        del session.trained.losses[2:]
        for step in (2, 3):
            session.run_step(step)
        assert_same(session.collect(), expected)


def test_a_model_constructed_on_the_cpu_is_sharded_onto_the_device(accelerator: Any, tmp_path: Path) -> None:
    there = case_on(DEVICE, "gpt")
    moved = Case(lambda: CASES["gpt"].build().to(DEVICE), there.batch, there.loss, there.unit)
    here = Case(CASES["gpt"].build, there.batch, there.loss, there.unit)
    expected = reference(moved, Recipe())
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        assert_same(start(here, Recipe(), store, device=DEVICE).run(), expected)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_no_thread_makes_a_call_that_waits_for_the_device(
    activations: str, update: str, update_on: str, sim: ModuleType, tmp_path: Path
) -> None:
    max_norm = 0.5 if update == "step" else None
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        options = {"device": DEVICE, "update_on": update_on, "activations": activations}
        session = start(case_on(DEVICE, "gpt"), Recipe(max_norm=max_norm), store, update, **options)
        batches = [session.case.batch(index) for index in range(6)]
        for step, batch in enumerate(batches):
            if step == 3:
                sim.reset()
            session.case.loss(session.model, batch).backward()
            if max_norm is not None:
                tiered.clip_grad_norm_(session.model, max_norm)
            session.optimizer.step()
            session.optimizer.zero_grad()
        assert sim.blocking() == {}


def test_a_run_goes_from_the_cpu_to_the_device_and_back(accelerator: Any, tmp_path: Path) -> None:
    recipe = Recipe(param_dtype=BF16)
    options: dict[str, Any] = {"update_on": "cpu", "activations": "keep"}
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        session = start(case_on("cpu", "gpt"), recipe, store, device="cpu", **options)
        for step in range(2):
            session.run_step(step)
        before, moments = session.model.state_dict(), session.optimizer.state_dict()["state"]
        store.commit({"step": 2})
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), recipe, store, device=DEVICE, **options)
        assert store.resume() == {"step": 2}
        assert all(torch.equal(value, before[name]) for name, value in session.model.state_dict().items())
        for index, state in session.optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, moments[index][name]) for name, value in state.items())
        session.run_step(2)
        after = session.model.state_dict()
        assert not torch.equal(after["emb.weight"], before["emb.weight"])
        store.commit({"step": 3})
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        session = start(case_on("cpu", "gpt"), recipe, store, device="cpu", **options)
        assert store.resume() == {"step": 3}
        assert all(torch.equal(value, after[name]) for name, value in session.model.state_dict().items())


def test_a_run_updated_on_the_device_is_not_resumed_elsewhere_unasked(accelerator: Any, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, device=DEVICE, update_on="device")
        session.run_step(0)
        store.commit({"step": 1})
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        with pytest.raises(UsageError, match="updated on a compute device"):
            start(case_on("cpu", "gpt"), Recipe(), store, device="cpu")
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        start(case_on("cpu", "gpt"), Recipe(), store, device="cpu", update_on="cpu")
        assert store.resume() == {"step": 1}


@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_is_unfrozen_later_is_updated_on_the_device(update: str, accelerator: Any, tmp_path: Path) -> None:
    """Updates of larger units take more of the device's memory than those that the run began with."""

    def losses(model: Any, make: Any) -> list[torch.Tensor]:
        optimizer, found = make(model[4].parameters(), lr=1e-2), []
        for step in range(4):
            if step in {1, 2}:
                layer = model[4 - 2 * step].requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found

    def build() -> Any:
        torch.manual_seed(1)
        layers = nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
        model = nn.Sequential(*layers).requires_grad_(False)
        model[4].requires_grad_(True)
        return model

    expected = losses(build().to(DEVICE), functools.partial(torch.optim.AdamW, fused=True))
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        model = tiered.shard(build(), store, unit=nn.Linear, device=DEVICE, update_on="device")
        assert all(map(torch.equal, losses(model, functools.partial(tiered.AdamW, update=update)), expected))


def test_a_tensor_that_keeps_a_buffer_alive_is_not_overwritten(accelerator: Any, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, device=DEVICE, hold=0)
        kept: list[torch.Tensor] = []
        block = session.model.blocks[1]  # type: ignore[union-attr,index]
        hook = block.register_forward_hook(lambda module, *_: kept.append(module.ln1.weight.detach().view(-1)))
        session.run_step(0)
        hook.remove()
        before = [tensor.cpu() for tensor in kept]
        for step in range(1, 3):
            session.run_step(step)
        assert all(torch.equal(tensor.cpu(), value) for tensor, value in zip(kept, before, strict=True))
        kept.clear()
        session.run_step(3)


def test_a_device_budget_that_is_too_small_names_the_smallest(accelerator: Any, tmp_path: Path) -> None:
    smallest = smallest_device_memory("gpt", Recipe(), tmp_path / "one", device=DEVICE, update_on="cpu")
    with tiered.Store(tmp_path / "two", dram=ROOMY_NBYTES, device_memory=smallest - 1) as store:
        with pytest.raises(tiered.CapacityError, match=f"smallest that works is {smallest} bytes"):
            start(case_on(DEVICE, "gpt"), Recipe(), store, device=DEVICE, update_on="cpu")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES) as store:
        with pytest.raises(UsageError, match="expected 'auto', 'cpu' or the accelerator of this process"):
            start(case_on("cpu", "gpt"), Recipe(), store, device="cuda")


def test_a_step_copies_parameters_in_twice_and_gradients_out_once(accelerator: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": DEVICE, "update_on": "cpu", "activations": "keep", "hold": 0}
    budget = smallest_device_memory("gpt", Recipe(), tmp_path / "refused", **options)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, **options)
        units = next(session.model.parameters()).segment.unit.engine.units  # type: ignore[attr-defined]
        copies = units[0].tier.copies
        for step in range(3):
            session.run_step(step)
        before = copies.in_bytes, copies.out_bytes
        session.run_step(3)
        assert copies.in_bytes - before[0] <= 2 * sum(unit.nbytes for unit in units)
        assert copies.out_bytes - before[1] == sum(unit.layout.gradient_nbytes for unit in units)


def test_the_next_unit_is_on_its_way_before_the_last_operation_of_this_one(accelerator: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": DEVICE, "update_on": "cpu", "activations": "keep"}
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, **options)
        for step in range(2):
            session.run_step(step)
        session.optimizer.state_dict()  # the updates have ended
        tokens = session.case.batch(3)[0]
        seen: list[tuple[int, int]] = []
        for block in session.model.blocks:  # type: ignore[union-attr]
            copies = block.ln1.weight.segment.unit.tier.copies  # type: ignore[union-attr]
            block.register_forward_hook(lambda *_, copies=copies: seen.append((len(seen), copies.in_bytes)))
        with torch.no_grad():
            session.model(tokens)
            seen.clear()
            session.optimizer.zero_grad()
            session.model.blocks[0].ln1.weight.segment.unit.tier.memory.forget()  # type: ignore[union-attr,index]
            before = copies.in_bytes
            session.model(tokens)
        nbytes = [block.ln1.weight.segment.unit.nbytes for block in session.model.blocks]  # type: ignore[union-attr]
        for number, (_, copied) in enumerate(seen[:-1]):  # as block ``number`` ends, the one after it was copied, too
            assert copied - before >= sum(nbytes[: number + 2]), seen


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_scaler_and_a_clipping_give_the_bits_that_they_give_in_memory(
    is_ours: bool, accelerator: Any, tmp_path: Path
) -> None:
    case = case_on(DEVICE, "gpt")
    clip = tiered.clip_grad_norm_ if is_ours else torch.nn.utils.clip_grad_norm_

    def train(model: torch.nn.Module, optimizer: Any, scaler: Any, clip: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            scaler.scale(case.loss(model, case.batch(step))).backward()
            scaler.unscale_(optimizer)
            clip(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {name: value.cpu().clone() for name, value in model.state_dict().items()}

    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    expected = train(model, optimizer, torch.amp.GradScaler(DEVICE), torch.nn.utils.clip_grad_norm_)
    accelerator.reset()
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        torch.manual_seed(0)
        model = tiered.shard(case.build(), store, device=DEVICE, hold=0)
        scaler = tiered.GradScaler(DEVICE) if is_ours else torch.amp.GradScaler(DEVICE)
        values = train(model, tiered.AdamW(model.parameters(), lr=1e-2), scaler, clip)
    assert all(torch.equal(values[name], expected[name]) for name in expected)


def small_store(directory: Path, nbytes: int, device_memory: int, **options: Any) -> tiered.Store:
    """Open a store of a page-locked DRAM budget below the least that a user may give."""
    registrar = registrar_for(DEVICE)
    assert registrar is not None
    arena = PinnedArena(nbytes, registrar)
    return tiered.Store(directory, dram=nbytes, device_memory=device_memory, _arena=arena, **options)


@pytest.mark.parametrize(
    ("name", "dtype", "update", "update_on"),
    [
        ("gpt", BF16, "step", "device"), ("tied_head", None, "backward", "cpu"), ("nested_units", None, "step", "cpu"),
        ("cnn", BF16, "backward", "device"), ("lstm", BF16, "step", "cpu"), ("mixed_dtypes", None, "step", "device"),
    ],
)  # fmt: skip
def test_bits_with_the_smallest_budgets_of_both_tiers(
    name: str, dtype: Any, update: str, update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    recipe = Recipe(param_dtype=dtype, num_steps=3, num_micro_steps=2 if update == "step" else 1)
    expected = reference_on(DEVICE, name, recipe, update_on)
    options: dict[str, Any] = {"device": DEVICE, "update_on": update_on, "activations": "keep", "hold": 0}
    device_memory = smallest_device_memory(name, recipe, tmp_path / "refused", **options)
    with pytest.raises(CapacityError) as refusal:
        with small_store(tmp_path / "small", 64 << 10, device_memory, durable=False) as store:
            start(case_on(DEVICE, name), recipe, store, update, **options)
    accelerator.reset()
    with small_store(tmp_path / "store", budget_named_in(refusal.value), device_memory) as store:
        trained = start(case_on(DEVICE, name), recipe, store, update, **options).run()
    assert_same(trained, expected)


@pytest.mark.parametrize("num_micro_steps", [1, 2])
def test_gradients_are_not_written_where_dram_has_room(num_micro_steps: int, accelerator: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": DEVICE, "update_on": "cpu", "activations": "keep"}
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(num_micro_steps=num_micro_steps), store, **options)
        session.run_step(0)
        before = store.statistics().write_bytes
        for step in range(1, 4):
            session.run_step(step)
        assert store.statistics().write_bytes == before


def test_a_norm_is_that_of_the_gradient_as_it_is_now(accelerator: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": DEVICE, "update_on": "cpu", "activations": "keep", "hold": 0}
    budget = smallest_device_memory("gpt", Recipe(), tmp_path / "refused", **options)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, **options)
        parameter = session.model.blocks[2].fc.weight  # type: ignore[union-attr,index]
        norms = []
        for index in (0, 0, 0):  # the second time the question is known, the third time the gradient is another one
            session.case.loss(session.model, session.case.batch(index)).backward()
            parameter.segment.unit.gradients.store_away()
            stand_in = parameter.grad
            norms.append(torch.linalg.vector_norm(stand_in).item())
        parameter.segment.unit.gradients.open()
        parameter.grad.zero_()
        assert torch.linalg.vector_norm(stand_in).item() == 0.0
        assert norms[0] < norms[1] < norms[2]


def test_state_is_the_same_wherever_it_is_updated(accelerator: Any, tmp_path: Path) -> None:
    trained = []
    for update_on in ("cpu", "device"):
        with tiered.Store(tmp_path / update_on, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
            recipe = Recipe(param_dtype=BF16, adamw={"lr": 1e-2, "state": "compact"})
            trained.append(start(case_on(DEVICE, "gpt"), recipe, store, device=DEVICE, update_on=update_on).run())
    here, there = trained
    for kept in ("parameters", "masters", "exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(here, kept), getattr(there, kept)
        assert ours.keys() == theirs.keys() and len(ours) > 0
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), kept


def test_tensors_are_on_the_device_that_belongs_to_them(accelerator: Any, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "gpt"), Recipe(), store, device=DEVICE)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            session.case.loss(session.model, case_on("cpu", "gpt").batch(0))
        loss = session.case.loss(session.model, session.case.batch(0))
        loss.backward()
        parameters = list(session.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = tiered.clip_grad_norm_(session.model, 1.0)
        for tensor in (loss, norm, *parameters, *gradients, *session.model.buffers()):
            assert tensor.device.type == DEVICE
        session.optimizer.step()
        assert all(value.device.type == "cpu" for value in session.model.state_dict().values())
        for state in session.optimizer.state_dict()["state"].values():
            assert all(value.device.type == "cpu" for value in state.values())


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == has_many] for has_many in (True, False))
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3e-3, "betas": (0.8, 0.9)}]


def evaluate(model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """Look at the model between two steps, without gradients."""
    model.eval()
    with torch.no_grad():
        seen = model(case_on(DEVICE, "gpt").batch(step)[0])
    model.train()
    return [seen.float().cpu()]


@pytest.mark.parametrize(("update", "update_on"), [("step", "device"), ("backward", "cpu")])
def test_bits_with_a_schedule_groups_and_evaluations(
    update: str, update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    recipe = Recipe(
        param_dtype=BF16, param_groups=groups, between=evaluate,
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        updates_on="cpu" if update_on == "cpu" and DEVICE != "sim" else "",
    )  # fmt: skip
    expected = reference(case_on(DEVICE, "gpt"), recipe)
    options: dict[str, Any] = {"device": DEVICE, "update_on": update_on, "activations": "keep", "hold": 0}
    budget = smallest_device_memory("gpt", recipe, tmp_path / "refused", **options)
    accelerator.reset()
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        assert_same(start(case_on(DEVICE, "gpt"), recipe, store, update, **options).run(), expected)


class Squares(torch.nn.Module):
    """A unit that saves its input, which the caller may write afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((256,), 1.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.square() * self.scale


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_swapped_out_holds_no_stream_up_and_is_not_written_meanwhile(
    is_written: bool, sim: ModuleType, tmp_path: Path
) -> None:
    """As in memory: a saved tensor that was written in place is an error, also where the caller has dropped it."""
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        with torch.device("sim"):
            model = torch.nn.Sequential(Squares(), Squares())
        model = tiered.shard(model, store, device="sim", unit=Squares, activations="swap")
        sim.set_query_delay(4)
        rows = torch.randn(64, 256).to("sim")
        sim.keep_log()
        hidden = model[0](rows.requires_grad_())
        loss = model[1](hidden)
        events = [entry.address for entry in sim.log() if entry.kind == "record" and entry.stream == out_of(model)]
        waits = [entry.address for entry in sim.log() if entry.kind == "wait" and entry.stream == 0]
        assert events and not set(events) & set(waits)
        if is_written:
            with torch.no_grad():
                hidden.add_(1)
            sim.races()  # the copy may have been torn: that is what the error is for
        del hidden
        with pytest.raises(RuntimeError, match="modified by an inplace operation") if is_written else nullcontext():
            loss.sum().backward()


def test_a_thread_that_runs_ahead_of_the_device_waits_for_what_leaves_it(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device memory that swapped activations keep until their copies have ended is bounded."""
    num_rows = 64
    nbytes = num_rows * 256 * 4
    monkeypatch.setattr(copies, "MOST_LEAVING_NBYTES", 2 * nbytes)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        with torch.device("sim"):
            model = torch.nn.Sequential(*(Squares() for _ in range(8)))
        model = tiered.shard(model, store, device="sim", unit=Squares, activations="swap")
        sim.set_query_delay(50)
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        loss = model(torch.randn(num_rows, 256).to("sim").requires_grad_()).sum()
        assert torch.accelerator.max_memory_allocated() - before < 8 * nbytes  # without, two of each of eight layers
        loss.backward()
        assert sim.blocking().get("MainThread", {}).keys() <= {"blocking copy"}


class SweptBehind:
    """A lock, behind whose next block another thread gives the copies back that have ended."""

    def __init__(self, copies: Any) -> None:
        self.copies, self.lock, self.is_armed = copies, copies._lock, True

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()
        if self.is_armed:
            self.is_armed = False
            thread = threading.Thread(target=self.copies.sweep)
            thread.start()
            thread.join()


def test_a_copy_that_another_thread_gives_back_is_still_counted(sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(torch.nn.Linear(8, 8).to("sim"), store, device="sim")
        tier: Any = model.weight.segment.unit.tier  # type: ignore[union-attr]
        store.working_set.create("leaving", 4096, scratch=True)
        tier.put(torch.ones(1024, device="sim"), "leaving", 0)
        torch.accelerator.synchronize()
        assert len(tier.copies._leaving) == 1
        tier.copies._lock = SweptBehind(tier.copies)
        tier.copies._let_leave(1)  # order: it has looked at the copy, and its lease ends before it adds up
        assert not tier.copies._leaving


def out_of(model: torch.nn.Module) -> int:
    tier: Any = next(model.parameters()).segment.unit.tier  # type: ignore[attr-defined]
    return int(tier.copies.stream_out.stream_id)
