"""Resuming and rolling back continue with the same bits, or refuse with a diff and lose nothing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiered
from tests.models import CASES, GPT, Block, Case, batch_of_tokens
from tests.pairwise import pairwise
from tests.reference import Recipe, Trained
from tests.zero.test_invisible import by_decay, cosine
from tests.zero.training import Session, assert_same, debug_store, reference, smallest_budget, start
from tiered.errors import CorruptionError, LeaseError, StepAbandonedError, StoreLostError, UsageError
from tiered.tools.cli import main
from tiered.zero.formats import state_layout

NUM_STEPS = 6


@dataclass
class Loader:
    """A loader with a position."""

    case: Case
    position: int = 0

    def __next__(self) -> tuple[Any, ...]:
        self.position += 1
        return self.case.batch(self.position - 1)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@dataclass
class Job:
    """A user's whole script: model, optimizer, scheduler and loader, all registered, and resumed."""

    session: Session
    loader: Loader
    step: int

    def run(self, until: int, *, wait: bool = True) -> None:
        """Train to step ``until`` with a commit after each."""
        for step in range(self.step, until):
            batch = next(self.loader)
            self.session.case = replace(self.session.case, batch=lambda _, batch=batch: batch)
            self.session.run_step(step)
            self.session.store.commit({"step": step + 1}, wait=wait)
            self.step = step + 1


def job(case: Case, recipe: Recipe, store: tiered.Store, update: str = "step", seed: int = 7) -> Job:
    """Start or go on; a run that goes on gets other seeds, which resuming must undo."""
    loader = Loader(case)
    store.register("loader", loader)
    session = start(case, recipe, store, update, seed=seed)
    return Job(session, loader, store.resume().get("step", 0))


def undisturbed(case: Case, recipe: Recipe) -> Trained:
    return reference(case, replace(recipe, num_steps=NUM_STEPS))


CASES_TO_RESUME = ("cnn", "lstm", "gpt", "data_dependent_order", "unused_parameter", "frozen_part", "mixed_dtypes")


@pairwise(name=CASES_TO_RESUME, param_dtype={"fp32": None, "bf16": torch.bfloat16}, update=["step", "backward"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    name: str, param_dtype: torch.dtype | None, update: str, drive_path: Path
) -> None:
    """Batch norm's buffers, dropout's generator, the scheduler and the loader included; three processes' worth."""
    case, recipe = CASES[name], Recipe(param_dtype=param_dtype, schedule=cosine, param_groups=by_decay)
    if name in ("unused_parameter", "data_dependent_order"):
        case = Case(case.build, case.batch, case.loss)
    nbytes = smallest_budget(case, recipe, update, drive_path / "probe")
    losses: list[Tensor] = []
    for life, until in enumerate((2, 3, NUM_STEPS)):
        with debug_store(drive_path / "store", nbytes) as store:
            resumed = job(case, recipe, store, update, seed=7 + 100 * life)
            assert resumed.step == len(losses)
            counter = getattr(resumed.session.model, "num_forwards", None)
            if counter is not None:  # a plain attribute is the user's own business
                resumed.session.model.num_forwards = resumed.step
            resumed.run(until, wait=life != 1)
            losses += resumed.session.trained.losses
            final = resumed.session.collect()
    final.losses = losses
    assert_same(final, undisturbed(case, recipe))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_budget_and_update_may_change_between_lives(update: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe(param_dtype=torch.bfloat16)
    other = {"step": "backward", "backward": "step"}[update]
    losses: list[Tensor] = []
    for kind, nbytes, until in ((update, 32 << 20, 2), (other, 1 << 20, 4), (update, 3 << 20, NUM_STEPS)):
        with debug_store(tmp_path, nbytes) as store:
            resumed = job(case, recipe, store, kind, seed=7 + len(losses))
            resumed.run(until)
            losses += resumed.session.trained.losses
            final = resumed.session.collect()
    final.losses = losses
    assert_same(final, undisturbed(case, recipe))


def test_leaving_by_an_exception_loses_what_came_after_the_last_commit(tmp_path: Path) -> None:
    case, recipe = CASES["cnn"], Recipe()
    with pytest.raises(RuntimeError, match="stopped by the test"), debug_store(tmp_path) as store:
        first = job(case, recipe, store)
        first.run(2)
        first.session.run_step(2)
        raise RuntimeError("stopped by the test")
    with debug_store(tmp_path) as store:
        resumed = job(case, recipe, store, seed=1)
        assert resumed.step == 2
        resumed.run(NUM_STEPS)
        resumed.session.trained.losses[:0] = first.session.trained.losses[:2]
        assert_same(resumed.session.collect(), undisturbed(case, recipe))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_steps_that_no_commit_covers_are_dropped_by_a_normal_exit(
    update: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be made twice: the state is that of an earlier step."""
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        first = job(case, recipe, store, update)
        first.run(2, wait=False)
        first.session.run_step(2)
        store["metrics"] = torch.ones(3)
    assert "closed without a commit" in caplog.text and "store.commit(state)" in caplog.text
    with debug_store(tmp_path) as store:
        resumed = job(case, recipe, store, update)
        assert resumed.step == 2 and "metrics" not in store
        resumed.run(NUM_STEPS)
        resumed.session.trained.losses[:0] = first.session.trained.losses[:2]
        assert_same(resumed.session.collect(), undisturbed(case, recipe))


def test_a_normal_exit_commits_steps_where_no_state_says_otherwise(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    for num_steps in (1, 2):
        with debug_store(tmp_path) as store:
            session = start(case, recipe, store)
            assert store.resume() == {}
            session.run_step(num_steps - 1)
            assert int(session.optimizer.state_dict()["state"][0]["step"]) == num_steps


def test_a_put_is_committed_by_a_normal_exit_when_all_steps_are(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        job(case, recipe, store).run(2, wait=False)
        store["metrics"] = torch.ones(3)
    with debug_store(tmp_path) as store:
        assert store.state == {"step": 2} and torch.equal(store["metrics"], torch.ones(3))


def test_training_before_resume_is_refused(tmp_path: Path) -> None:
    """A store that holds a run: going on without resume() would lose it."""
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        job(case, recipe, store).run(2)
    with debug_store(tmp_path) as store:
        session = start(case, recipe, store)
        with pytest.raises(UsageError, match="resume"):
            session.run_step(0)
        with pytest.raises(UsageError, match="resume"):
            store.commit({"step": 1})
    with debug_store(tmp_path) as store:
        assert job(case, recipe, store).step == 2


# -- rollback and abandoned steps ----------------------------------------------------------------------------------


def test_an_optimizer_made_after_the_resume_is_refused_until_another(tmp_path: Path) -> None:
    """Its step counts are still to be loaded: a step from 0 would divide the moments by other corrections."""

    def life(store: tiered.Store) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiered.shard(nn.Sequential(nn.Linear(4, 4)), store)
        store.resume()
        return model, tiered.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with debug_store(tmp_path) as store:
        step(*life(store))
        store.commit()
    with debug_store(tmp_path) as store:
        model, optimizer = life(store)
        with pytest.raises(UsageError, match=r"expected store\.resume"):
            model(torch.ones(1, 4))
        store.resume()
        step(model, optimizer)
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2}
        store.commit()


def test_an_optimizer_of_plain_parameters_made_after_the_resume_is_refused_until_another(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(4))
    for num_steps in (1, 2):
        with debug_store(tmp_path) as store:
            store.resume()
            optimizer = tiered.AdamW([parameter], lr=0.1, store=store)
            parameter.grad = torch.ones(4)
            if num_steps > 1:
                with pytest.raises(UsageError, match=r"expected store\.resume"):
                    optimizer.step()
                store.resume()
            optimizer.step()
            assert optimizer.state_dict()["state"][0]["step"] == num_steps
            store.commit()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_rollback_undoes_steps(param_dtype: torch.dtype | None, update: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe(param_dtype=param_dtype)
    nbytes = smallest_budget(case, recipe, update, tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes) as store:
        ours = job(case, recipe, store, update)
        ours.run(3)
        kept = len(ours.session.trained.losses)
        for step in (70, 71):
            ours.session.run_step(step)
        del ours.session.trained.losses[kept:]
        store.rollback()
        assert store.resume()["step"] == 3
        ours.run(NUM_STEPS)
        assert_same(ours.session.collect(), undisturbed(case, recipe))


def fail(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run_out(*_: Any) -> None:
    """As a compute device does whose memory is full."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FAILURES: dict[str, Callable[[nn.Module], Any]] = {
    "in_forward": lambda model: model.blocks[2].register_forward_pre_hook(fail),
    "in_backward": lambda model: model.blocks[1].register_full_backward_hook(fail),
    "in_last_gradient": lambda model: model.get_parameter("emb.weight").register_hook(fail),
    "in_gradient": lambda model: model.get_parameter("blocks.0.fc.weight").register_hook(fail),
    "out_of_memory_in_backward": lambda model: model.blocks[1].register_full_backward_hook(run_out),
    "interrupt_in_forward": lambda model: model.blocks[2].register_forward_hook(interrupt),
    "interrupt_in_backward": lambda model: model.get_parameter("blocks.1.fc.weight").register_hook(interrupt),
}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_step_that_fails_is_undone_by_rollback(failure: str, update: str, tmp_path: Path) -> None:
    """The last generation stays intact and usable; until then nothing but the way back is offered."""
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, update)
        ours.run(3)
        handle = FAILURES[failure](ours.session.model)
        with pytest.raises((ZeroDivisionError, torch.OutOfMemoryError, KeyboardInterrupt)):
            ours.session.run_step(99)
        handle.remove()
        if update == "backward" and "forward" not in failure:
            with pytest.raises(StepAbandonedError, match="rollback"):
                ours.session.run_step(99)
            with pytest.raises(StepAbandonedError, match="rollback"):
                store.commit({"step": 99})
            with pytest.raises(StepAbandonedError, match="rollback"):
                ours.session.optimizer.step()
            with pytest.raises(StepAbandonedError, match="rollback"):
                ours.session.model.state_dict()
        ours.session.optimizer.zero_grad() if update == "step" else None
        store.rollback()
        assert store.resume()["step"] == 3
        ours.run(NUM_STEPS)
        assert_same(ours.session.collect(), undisturbed(case, recipe))


def test_a_forward_after_backward_without_step_is_refused(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, "backward")
        ours.run(3)
        case.loss(ours.session.model, case.batch(50)).backward()
        for _ in range(2):
            with pytest.raises(UsageError, match=r"expected optimizer\.step\(\) first"):
                case.loss(ours.session.model, case.batch(51))
        assert store.resume()["step"] == 3  # resume is a way back, and step() one on (test_wrong_order.py)
        ours.run(NUM_STEPS)
        assert_same(ours.session.collect(), undisturbed(case, recipe))


def abandon(session: Session) -> None:
    """Have a step fail after its first updates."""
    handle = FAILURES["in_last_gradient"](session.model)
    with pytest.raises(ZeroDivisionError):
        session.run_step(99)
    handle.remove()


def assert_abandoned(session: Session) -> None:
    for refused in (lambda: session.run_step(99), lambda: session.store.commit({"step": 99}), session.model.state_dict):
        with pytest.raises(StepAbandonedError, match="rollback"):
            refused()


@pytest.mark.parametrize("word", ["rollback", "resume"])
def test_a_return_that_is_refused_leaves_the_step_abandoned(word: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, "backward")
        store["mine"] = torch.zeros(2000)
        ours.run(3)
        abandon(ours.session)
        with store.lease("mine", "rw"), pytest.raises(LeaseError, match="mine"):
            getattr(store, word)()
        assert_abandoned(ours.session)
        getattr(store, word)()
        ours.run(NUM_STEPS)
        assert_same(ours.session.collect(), undisturbed(case, recipe))


@pytest.mark.parametrize("word", ["rollback", "resume"])
def test_a_return_that_some_object_cannot_make_leaves_the_step_abandoned(word: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, "backward")
        ours.run(3)
        ours.session.run_step(99)
        load, ours.loader.load_state_dict = ours.loader.load_state_dict, fail  # type: ignore[method-assign]
        with pytest.raises(UsageError, match="on purpose"):
            getattr(store, word)()
        assert_abandoned(ours.session)
        ours.loader.load_state_dict = load  # type: ignore[method-assign]
        getattr(store, word)()
        del ours.session.trained.losses[-1:]
        ours.run(NUM_STEPS)
        assert_same(ours.session.collect(), undisturbed(case, recipe))


def test_where_nothing_was_committed_a_step_stays_abandoned(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with pytest.raises(StepAbandonedError, match="nothing was ever committed"), debug_store(tmp_path) as store:
        session = job(case, recipe, store, "backward").session
        abandon(session)
        with pytest.raises(UsageError, match="nothing was committed yet"):
            store.rollback()
        assert_abandoned(session)
        assert store.resume() == {}
        assert_abandoned(session)
    with debug_store(tmp_path) as store:
        assert store.generation == 0 and not list(store)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_where_nothing_was_committed_a_return_drops_nothing(update: str, tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, update)
        for step in range(2):
            ours.session.run_step(step)
            assert store.resume() == {}
            with pytest.raises(UsageError, match="nothing was committed yet"):
                store.rollback()
        assert_same(ours.session.collect(), reference(case, replace(recipe, num_steps=2)))


def test_training_after_a_resume_that_was_refused_is_refused(run_directory: Path) -> None:
    recipe = Recipe(param_groups=by_decay)
    with debug_store(run_directory) as store:
        session = start(CASES["gpt"], recipe, store)
        store.register("loader", Loader(CASES["gpt"]))
        store.register("new", Loader(CASES["gpt"]))
        with pytest.raises(UsageError, match="missing 'new'"):
            store.resume()
        for refused in (lambda: session.run_step(2), lambda: store.commit({"step": 3}), session.optimizer.step):
            with pytest.raises(UsageError, match=r"expected store\.resume\(\) first"):
                refused()


def test_an_abandoned_step_leaves_a_resumable_store(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path) as store:
        ours = job(case, recipe, store, "backward")
        ours.run(2)
        ours.session.model.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            ours.session.run_step(9)
    with debug_store(tmp_path) as store:
        resumed = job(case, recipe, store, "backward", seed=3)
        assert resumed.step == 2
        resumed.run(NUM_STEPS)
        resumed.session.trained.losses[:0] = ours.session.trained.losses[:2]
        assert_same(resumed.session.collect(), undisturbed(case, recipe))


def test_a_store_without_commits_has_no_way_back(tmp_path: Path) -> None:
    case, recipe = CASES["gpt"], Recipe()
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store, "backward")
        session.run_step(0)
        for refused in (store.commit, store.rollback, store.resume):
            with pytest.raises(UsageError, match="durable"):
                refused()
        session.run_step(1)
        session.model.blocks[0].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            session.run_step(2)
        with pytest.raises(StoreLostError, match="durable"):
            session.run_step(3)


# -- another model or optimizer ------------------------------------------------------------------------------------


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    with debug_store(tmp_path / "run") as store:
        job(CASES["gpt"], Recipe(param_groups=by_decay), store).run(2)
    return tmp_path / "run"


def wider() -> nn.Module:
    model = GPT()
    model.head = nn.Linear(24, 67, bias=False)
    return model


def renamed() -> nn.Module:
    model = GPT()
    model.output = model.head
    del model.head
    model.head = None
    return model


def with_buffer() -> nn.Module:
    model = GPT()
    model.register_buffer("extra", torch.ones(3))
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "more_blocks": (lambda: GPT(5), r"blocks\.4"),
    "fewer_blocks": (lambda: GPT(3), r"blocks\.3"),
    "other_shape": (wider, r"head\.weight.*61.*67|head\.weight.*67.*61"),
    "other_name": (renamed, r"head\.weight"),
    "other_buffer": (with_buffer, "extra"),
    "other_module": (lambda: nn.ModuleDict({"a": Block()}), r"a\.ln1\.weight.*none"),
}


def assert_the_run_is_intact(directory: Path) -> None:
    with debug_store(directory) as store:
        resumed = job(CASES["gpt"], Recipe(param_groups=by_decay), store, seed=1)
        assert resumed.step == 2
        resumed.run(NUM_STEPS)
        final = resumed.session.collect()
    expected = undisturbed(CASES["gpt"], Recipe(param_groups=by_decay))
    expected.losses = expected.losses[2:]
    assert_same(final, expected)


def assert_refused(directory: Path, build: Callable[[], nn.Module], recipe: Recipe, match: str) -> None:
    with pytest.raises(UsageError, match=match) as refusal:
        with debug_store(directory) as store:
            job(Case(build, batch_of_tokens), recipe, store)
    assert not isinstance(refusal.value, StepAbandonedError | CorruptionError)


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_with_a_diff(other: str, run_directory: Path) -> None:
    build, match = OTHERS[other]
    assert_refused(run_directory, build, Recipe(param_groups=by_decay if other != "other_module" else None), match)
    assert_the_run_is_intact(run_directory)


def test_another_dtype_is_refused_with_a_diff(run_directory: Path) -> None:
    recipe = Recipe(param_groups=by_decay, param_dtype=torch.bfloat16)
    assert_refused(run_directory, GPT, recipe, "(?s)float32.*bfloat16|bfloat16.*float32")
    assert_the_run_is_intact(run_directory)


@pytest.mark.parametrize("groups", [None, lambda model: by_decay(model)[::-1]], ids=["one_group", "other_order"])
def test_another_optimizer_is_refused_with_a_diff(groups: Any, run_directory: Path) -> None:
    assert_refused(run_directory, GPT, Recipe(param_groups=groups), "group")
    assert_the_run_is_intact(run_directory)


def exported(directory: Path, folder: Path) -> dict[str, Tensor]:
    """Return the values that `tiered export` writes of the run in ``directory``."""
    assert main(["export", str(directory), str(folder)]) == 0
    return load_file(folder / "model.safetensors")


def test_a_changed_model_begins_elsewhere_with_the_values_of_the_first(run_directory: Path, tmp_path: Path) -> None:
    values = exported(run_directory, tmp_path / "files")
    values["output.weight"] = values["head.weight"]
    del values["head.weight"]
    larger = GPT(5).state_dict() | exported(run_directory, tmp_path / "files of the same")
    for number, (build, wanted) in enumerate([(renamed, values), (lambda: GPT(5), larger)]):
        assert_refused(run_directory, build, Recipe(), "changed model begins in another directory.*tiered export RUN")
        with debug_store(tmp_path / f"run{number}") as store:
            found = tiered.shard(build(), store, weights=wanted).state_dict()
            assert wanted.keys() <= found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_another_optimizer_begins_elsewhere(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another kind with the weights alone, one of another state= with the moments, too."""
    monkeypatch.setattr(state_layout, "tried_compact_kernels", lambda: None)  # nothing is compiled for three steps
    with pytest.raises(UsageError, match=r"another begins in another directory.*tiered export RUN FOLDER"):
        with debug_store(run_directory) as store:
            tiered.Lion(tiered.shard(GPT(), store).parameters())
    values = exported(run_directory, tmp_path / "files")
    with debug_store(tmp_path / "lion") as store:
        model = tiered.shard(GPT(), store, weights=tmp_path / "files")
        tiered.Lion(model.parameters())
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items() if name in values)
    recipe = Recipe(param_groups=by_decay)
    with debug_store(run_directory) as store:
        first = job(CASES["gpt"], recipe, store).session
        states = first.model.state_dict(), first.optimizer.state_dict()
    compact = replace(recipe, adamw={**recipe.adamw, "state": "compact"})
    assert_refused(run_directory, GPT, compact, r"another state= with optimizer\.load_state_dict\(\)")
    with debug_store(tmp_path / "compact") as store:
        second = start(CASES["gpt"], compact, store)
        second.model.load_state_dict(states[0])
        second.optimizer.load_state_dict(states[1])
        second.run_step(2)
        assert {int(state["step"]) for state in second.optimizer.state_dict()["state"].values()} == {3}


def test_a_run_gets_a_second_drive_in_a_new_store(run_directory: Path, tmp_path: Path) -> None:
    case, recipe, two = CASES["gpt"], Recipe(param_groups=by_decay), (tmp_path / "one", tmp_path / "two")
    with pytest.raises(UsageError, match=r"two is empty.*or state_dict\(\) of model and optimizer, to a new store"):
        tiered.Store(run_directory, two[1], dram="32MiB")
    with debug_store(run_directory) as store:
        old = job(case, recipe, store)
        states = old.session.model.state_dict(), old.session.optimizer.state_dict()
        random = torch.get_rng_state()
    with tiered.Store(*two, dram="32MiB") as store:
        new = Job(start(case, recipe, store), Loader(case, old.loader.position), old.step)
        new.session.model.load_state_dict(states[0])
        new.session.optimizer.load_state_dict(states[1])
        torch.set_rng_state(random)
        new.run(NUM_STEPS)
        final = new.session.collect()
    expected = undisturbed(case, recipe)
    expected.losses = expected.losses[2:]
    assert_same(final, expected)


@pytest.mark.parametrize("key", ["model/parameters/blocks.1", "model/state/blocks.1/0"])
def test_a_run_that_lost_a_key_is_refused_with_its_name(key: str, run_directory: Path) -> None:
    """As after `tiered verify --drop`."""
    with debug_store(run_directory) as store:
        del store[key]
        store._generations.commit_as_is()
    assert_refused(run_directory, GPT, Recipe(param_groups=by_decay), f"without '{key}'")


def test_something_registered_that_the_run_had_not_is_refused(run_directory: Path) -> None:
    assert_refused(run_directory, GPT, Recipe(param_groups=by_decay, schedule=cosine), "scheduler.*new after resume")
    assert_the_run_is_intact(run_directory)
