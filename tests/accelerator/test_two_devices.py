"""Two devices: a model is on one of them, no thread of tiered's calls the other, and the caller's own one stays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.reference import Recipe
from tests.zero.training import Session, assert_same, start
from tiered.bytes.critical_section import BoundedThread
from tiered.tools.cli import main
from tiered.zero.activations import swapped_activations

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")


@pytest.fixture(autouse=True)
def device_of_the_caller(monkeypatch: pytest.MonkeyPatch, sim: ModuleType) -> Iterator[None]:
    """Activations of any size are swapped; after the test the thread is on device 0 again."""
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)
    gc.collect()  # what other tests have left ends now, and not as a call of this one
    yield
    torch.accelerator.set_device_index(0)


def threads_on(device: int, sim: ModuleType) -> dict[str, dict[str, int]]:
    """Return the threads that have called ``device`` since the log began, with the calls of each."""
    return {thread: calls for (thread, called), calls in sim.calls().items() if called == device}


@pytest.mark.parametrize(
    ("update", "update_on", "activations", "max_norm"),
    [
        ("step", "cpu", "swap", 0.5),
        ("step", "device", "recompute", 0.5),
        ("backward", "cpu", "keep", None),
        ("backward", "device", "swap", None),
    ],
)
def test_no_thread_calls_another_device_than_the_models(
    update: str, update_on: str, activations: str, max_norm: float | None, sim: ModuleType, tmp_path: Path
) -> None:
    recipe = Recipe(num_steps=3, max_norm=max_norm)
    expected = reference_on("sim", "gpt", recipe, update_on)
    options: dict[str, Any] = {"device": "sim", "update_on": update_on, "activations": activations, "hold": 0}
    torch.accelerator.set_device_index(1)
    budget = smallest_device_memory("gpt", recipe, tmp_path / "refused", **options)
    sim.reset()
    sim.set_query_delay(2)
    sim.keep_log()
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        first = start(case_on("sim:1", "gpt"), recipe, store, update, **options)
        for step in range(2):
            first.run_step(step)
            store.commit({"step": step + 1}, wait=False)
            store.put("of the device", torch.full((5,), float(step), device="sim"))
            store.get("of the device").to("sim")
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        second = start(case_on("sim:1", "gpt"), recipe, store, update, **options)
        assert store.resume() == {"step": 2}
        second.run_step(2)
        second.collect()
        store.commit()
    del store, first.store, first.model, first.optimizer
    gc.collect()
    assert threads_on(0, sim) == {}
    assert {"MainThread", *(["tiered-update"] if update_on == "device" else [])} <= threads_on(1, sim).keys()
    second.trained.losses[:0], second.trained.norms[:0] = first.trained.losses, first.trained.norms
    assert_same(second.trained, expected)


@pytest.mark.parametrize("of_caller", [0, 1])
def test_the_callers_device_stays(of_caller: int, sim: ModuleType, tmp_path: Path) -> None:
    def stays(call: Callable[[], Any]) -> Any:
        result = call()
        assert torch.accelerator.current_device_index() == of_caller
        return result

    torch.accelerator.set_device_index(of_caller)
    sim.keep_log()
    options: dict[str, Any] = {"device": "sim:1", "hold": 0, "update_on": "device", "activations": "swap"}
    case = case_on("sim:1", "gpt")
    store = stays(lambda: tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES))
    session = stays(lambda: start(case, Recipe(), store, **options))
    model, optimizer = session.model, session.optimizer
    for index in range(2):
        with stays(lambda: tiered.accumulate(model)) if index == 0 else nullcontext():
            loss = stays(lambda: case.loss(model, case.batch(index)))  # noqa: B023
            stays(loss.backward)
    stays(lambda: tiered.clip_grad_norm_(model, 0.5))
    stays(optimizer.step)
    stays(optimizer.zero_grad)
    state = stays(model.state_dict)
    stays(lambda: model.load_state_dict(state))
    with stays(lambda: tiered.unsharded(model)):
        next(model.parameters()).detach().mul_(2)
    assert torch.accelerator.current_device_index() == of_caller
    stays(lambda: optimizer.load_state_dict(optimizer.state_dict()))
    stays(lambda: store.commit({}, wait=False))
    stays(store.wait_for_commit)
    stays(lambda: store.put("key", torch.ones(3, device="sim:1")))
    assert stays(lambda: store.get("key")).tolist() == [1, 1, 1]
    stays(store.statistics)
    stays(store.close)
    if of_caller == 0:  # tiered's threads are on the model's device all the same
        assert not [thread for thread in threads_on(0, sim) if thread.startswith("tiered-")]


def test_two_models_train_on_two_devices_in_turns(sim: ModuleType, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=2, max_norm=0.5)
    expected = reference_on("sim", "gpt", recipe)
    sessions: list[Session] = []
    for index in range(2):
        store = tiered.Store(tmp_path / str(index), dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES)
        sessions.append(start(case_on(f"sim:{index}", "gpt"), recipe, store, device=f"sim:{index}", update_on="device"))
    torch.manual_seed(8)
    for step in range(recipe.num_steps):
        states = [torch.sim.get_rng_state(index) for index in range(2)]  # type: ignore[attr-defined]
        assert states[0].equal(states[1])
        for session in sessions:
            session.run_step(step)
    for session in sessions:
        assert_same(session.collect(), expected)
        session.store.close()


def test_a_run_of_the_command_line_is_on_its_device_alone(sim: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one word, one meaning; " * 1300)
    sizes = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--dram", "32MiB", "--steps", "2")
    places = ("--store", str(tmp_path / "run"), "--data", str(tmp_path / "text"), "--device", "sim:1")
    sim.keep_log()
    assert main(["train", *places, *sizes, "--update-on", "device"]) == 0
    gc.collect()
    assert threads_on(0, sim) == {} != threads_on(1, sim)


def test_the_collector_may_end_a_devices_events_in_any_thread_of_tiereds(sim: ModuleType) -> None:
    torch.accelerator.set_device_index(1)
    cycle: list[Any] = [torch.accelerator.current_stream().record_event()]
    cycle.append(cycle)
    sim.keep_log()
    del cycle
    thread = BoundedThread(target=gc.collect, name="tiered-collector")
    thread.start()
    thread.join()
    assert threads_on(1, sim)["tiered-collector"]["destroy event"] >= 1
    assert threads_on(0, sim) == {}
