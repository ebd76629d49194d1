"""A resumed loop over ``tiered.resumable`` is the undisturbed one, which is the loop over the plain loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

import tiered
from tiered.errors import UsageError
from tiered.loader.resumable import ResumableLoader
from tiered.store.format.state_text import decode, encode
from tiered.zero.model_state import RandomState

pytestmark = pytest.mark.usefixtures("ended_workers")

NUM_ITEMS, WIDTH = 7, 4

Draw = Callable[[], float]


def item(number: int) -> Tensor:
    return torch.linspace(number, number + 1, WIDTH)  # float32 (WIDTH,)


class Items(Dataset[Tensor]):
    """Seven items; ``draw`` is called for each that is loaded, and ``loaded`` notes it."""

    def __init__(self, draw: Draw = float) -> None:
        self.draw = draw
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, number: int) -> Tensor:
        self.loaded.append(number)
        return item(number) + self.draw()


class ItemsWithGenerator(Items):
    def __init__(self) -> None:
        super().__init__(lambda: float(self.noise.random()))
        self.noise = np.random.default_rng(3)


class Stream(IterableDataset[Tensor]):
    """Shared out to the workers, and shuffled by them: it holds back two items, and draws which to give."""

    def __init__(self, draw: Draw = random.random) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        numbers = range(NUM_ITEMS) if worker is None else range(worker.id, NUM_ITEMS, worker.num_workers)
        held: list[int] = []
        for number in numbers:
            held.append(number)
            if len(held) == 3:
                yield item(held.pop(int(3 * self.draw())))
        yield from map(item, held)


class Again:
    """An iterable whose generator function makes a DataLoader when its first batch is wanted."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from DataLoader(Items(), batch_size=2, shuffle=True)


class Counting(Again):
    """A user's own loader with a position; it skips by itself."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position += 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Turning(Sampler[int]):
    """A user's sampler with a state: each epoch begins one further on."""

    def __init__(self) -> None:
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        turn = self.turn
        return iter((number + turn) % NUM_ITEMS for number in range(NUM_ITEMS))

    def __len__(self) -> int:
        return NUM_ITEMS

    def state_dict(self) -> dict[str, int]:
        return {"turn": self.turn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turn = state["turn"]


class Passes(Sampler[int]):
    """A user's sampler that counts its passes, at their beginning or at their end, and shuffles by the number."""

    at_end = 0

    def __init__(self, *, counts_at_end: bool = False) -> None:
        self.counts_at_end = counts_at_end
        if not counts_at_end:
            self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if not self.counts_at_end:
            self.epoch += 1
        number = self.at_end if self.counts_at_end else self.epoch
        return self._indices(torch.Generator().manual_seed(number))

    def _indices(self, generator: torch.Generator) -> Iterator[int]:
        yield from torch.randperm(NUM_ITEMS, generator=generator).tolist()
        self.at_end += self.counts_at_end  # an attribute of the class until then

    def __len__(self) -> int:
        return NUM_ITEMS


class PassesOfBatches:
    """A user's own loader that counts its passes."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return (
            item(number)[None]
            for number in torch.randperm(4, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


class StreamOfPasses(IterableDataset[Tensor]):
    """Iterable data that count their passes."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return map(item, torch.randperm(NUM_ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class DrawingEagerly(Turning):
    """It draws when its iterator is made, not at the first item."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM_ITEMS).tolist())


class Hidden(Sampler[int]):
    """It draws from python's generator as it goes on, which nobody else does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_ITEMS):
            yield random.randrange(NUM_ITEMS)

    def __len__(self) -> int:
        return NUM_ITEMS


def loader(data: Dataset[Tensor] | None = None, num_workers: int = 0, **options: Any) -> DataLoader[Tensor]:
    options = {"batch_size": 2} | options
    return DataLoader(Items() if data is None else data, num_workers=num_workers, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def own_generator(**options: Any) -> DataLoader[Tensor]:
    generator = seeded()
    return loader(sampler=RandomSampler(Items(), replacement=True, generator=generator), generator=generator, **options)


def batches(sampler: Sampler[int] | None = None) -> BatchSampler:
    return BatchSampler(sampler or RandomSampler(Items()), batch_size=2, drop_last=False)


DATA_LOADERS: dict[str, Callable[..., DataLoader[Tensor]]] = {
    "in_order": loader,
    "shuffled": lambda **options: loader(shuffle=True, **options),
    "drop_last": lambda **options: loader(shuffle=True, drop_last=True, **options),
    "own_generator": own_generator,
    "shuffled_by_own_generator": lambda **options: loader(shuffle=True, generator=seeded(), **options),
    "weighted": lambda **options: loader(sampler=WeightedRandomSampler([1.0] * NUM_ITEMS, NUM_ITEMS), **options),
    "subset": lambda **options: loader(sampler=SubsetRandomSampler(range(1, 6)), **options),
    "batch_sampler": lambda **options: loader(batch_sampler=batches(), batch_size=1, **options),
    "list_of_batches": lambda **options: loader(batch_sampler=[[0, 3], [5], [1, 2]], batch_size=1, **options),
    "batch_size_none": lambda **options: loader(batch_size=None, shuffle=True, **options),
    "turning_sampler": lambda **options: loader(sampler=Turning(), **options),
    "counting_sampler": lambda **options: loader(sampler=Passes(), **options),
    "counting_at_the_end": lambda **options: loader(sampler=Passes(counts_at_end=True), **options),
    "counting_within_a_batch_sampler": lambda **options: loader(
        batch_sampler=batches(Passes()), batch_size=1, **options
    ),
    "eager_sampler": lambda **options: loader(sampler=DrawingEagerly(), **options),
    "drawing_sampler": lambda **options: loader(batch_sampler=batches(Hidden()), batch_size=1, **options),
}
ITERABLES: dict[str, Callable[[], Iterable[Tensor]]] = {
    "list": lambda: [item(number)[None] for number in range(4)],
    "iterable": Again,
    "own_state": Counting,
    "counting_batches": PassesOfBatches,
    "counting_stream": lambda: loader(StreamOfPasses()),
    "stream": lambda: loader(Stream()),
    "drawing_items": lambda: loader(Items(lambda: float(torch.rand(()))), shuffle=True),
    "drawing_items_of_their_own": lambda: loader(ItemsWithGenerator(), shuffle=True),
}


@dataclass
class Run:
    """A loop with dropout over ``loader``, that of a user, and what a commit after each step has."""

    loader: Iterable[Tensor]
    losses: list[Tensor] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def train(self, epochs: Iterable[int]) -> Run:
        for _ in epochs:
            for batch in self.loader:
                loss = self.model(batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.detach())
                if isinstance(self.loader, ResumableLoader):
                    self.commits.append(self.commit())
        return self

    def commit(self) -> str:
        states = {"random": RandomState(), "model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return encode({name: part.state_dict() for name, part in states.items()})

    def resume(self, text: str) -> None:
        state = decode(text)
        RandomState().load_state_dict(state["random"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])

    def results(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.losses, *self.model.parameters(), *moments, torch.get_rng_state()]


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def same(left: Run, right: Run) -> bool:
    pairs = zip(left.results(), right.results(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def no_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not caplog.records


def check(
    make: Callable[[], Iterable[Tensor]], *, num_epochs: int = 3, has_workers: bool = False, **options: Any
) -> None:
    """The plain loop, the undisturbed one, and it resumed after each step of the first epoch, have the same bits.

    And after the second step of the next epoch, the first of the last, and the last. Where it ``has_workers``, whose
    start takes most of the time: after the first step, the last one of the first epoch, and one within the last.
    """
    seed(7)
    plain = Run(make()).train(range(num_epochs))
    seed(7)
    wrapped = tiered.resumable(make(), **options)
    undisturbed = Run(wrapped).train(range(wrapped.epoch, num_epochs))
    assert same(undisturbed, plain)
    assert len(undisturbed.commits) == len(plain.losses)
    num, per_epoch = len(undisturbed.commits), len(undisturbed.commits) // num_epochs
    later = [per_epoch + 2, num - per_epoch + 1, num]
    stops = [1, per_epoch, num - per_epoch // 2] if has_workers else [*range(1, per_epoch + 1), *later]
    for number in (stop for stop in stops if stop <= num):
        commit = undisturbed.commits[number - 1]
        seed(100 + number)  # a new process's
        wrapped = tiered.resumable(make(), **options)
        resumed = Run(wrapped, undisturbed.losses[:number])
        resumed.resume(commit)
        resumed.train(range(wrapped.epoch, num_epochs))
        assert same(resumed, undisturbed), f"stopped after step {number}"
        assert wrapped.epoch == num_epochs


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("name", DATA_LOADERS)
def test_a_resumed_data_loader_goes_on_with_the_bits_of_the_undisturbed_one(name: str) -> None:
    check(DATA_LOADERS[name])


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("name", ITERABLES)
def test_a_resumed_loader_goes_on_with_the_bits_of_the_undisturbed_one(name: str) -> None:
    check(ITERABLES[name])


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize(
    "name", ["shuffled", "own_generator", "turning_sampler", "drawing_sampler", "counting_at_the_end"]
)
def test_a_data_loader_with_workers_goes_on_with_the_bits_of_the_undisturbed_one(name: str) -> None:
    check(lambda: DATA_LOADERS[name](num_workers=2), num_epochs=2, has_workers=True)


@pytest.mark.usefixtures("no_warning")
def test_what_workers_draw_for_iterable_data_comes_back() -> None:
    check(lambda: loader(Stream(), num_workers=2), num_epochs=2, has_workers=True)


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("make", [lambda: Items(random.random), ItemsWithGenerator], ids=["process", "own"])
def test_replay_brings_back_what_workers_draw_for_items(make: Callable[[], Items]) -> None:
    check(lambda: loader(make(), num_workers=2, shuffle=True), num_epochs=2, has_workers=True, replay=True)


def test_replay_brings_back_what_a_data_set_counts() -> None:
    def make() -> DataLoader[Tensor]:
        data = Items()
        data.draw = lambda: float(len(data.loaded) % 3)
        return loader(data, shuffle=True)

    check(make, num_epochs=1, replay=True)


def stopped(wrapped: ResumableLoader[Tensor], num_batches: int) -> dict[str, Any]:
    """Take batches; return the state after them, as a commit has it."""
    iterator = iter(wrapped)
    for _ in range(num_batches):
        next(iterator)
    return decode(encode(wrapped.state_dict()))


def resumed_from(state: dict[str, Any], plain: Iterable[Tensor], **options: Any) -> ResumableLoader[Tensor]:
    wrapped = tiered.resumable(plain, **options)
    wrapped.load_state_dict(state)
    return wrapped


def test_items_that_were_used_are_not_loaded_again() -> None:
    state = stopped(tiered.resumable(loader()), 2)
    data = Items()
    assert len(list(resumed_from(state, loader(data)))) == 2
    assert data.loaded == [4, 5, 6]


def test_the_number_of_workers_may_change_where_items_are_skipped() -> None:
    seed(7)
    expected = list(loader(shuffle=True, generator=seeded()))
    state = stopped(tiered.resumable(loader(shuffle=True, generator=seeded())), 1)
    rest = list(resumed_from(state, loader(shuffle=True, generator=seeded(), num_workers=1)))
    assert all(map(torch.equal, rest, expected[1:])) and len(rest) == 3


def test_a_resumed_loader_leaves_the_random_state_as_it_found_it() -> None:
    state = stopped(tiered.resumable(loader(shuffle=True)), 2)
    resumed = resumed_from(state, loader(shuffle=True))
    found = encode(RandomState().state_dict())
    iter(resumed)
    assert encode(RandomState().state_dict()) == found


# -- epoch and position --------------------------------------------------------------------------------------------


def test_epochs_count_passes_from_0_and_the_last_batch_is_not_the_end() -> None:
    """What a loop does between two epochs comes after the last batch's commit: resumed from there it is done."""
    wrapped = tiered.resumable([1, 2])
    seen = [(wrapped.epoch, wrapped.position, number) for _ in range(2) for number in wrapped]
    assert seen == [(0, 1, 1), (0, 2, 2), (1, 1, 1), (1, 2, 2)]
    assert (wrapped.epoch, wrapped.position) == (2, 0) and "epoch=2, position=0" in repr(wrapped)
    resumed = resumed_from(stopped(tiered.resumable([1, 2]), 2), [1, 2])
    assert (resumed.epoch, resumed.position) == (0, 2)
    assert list(resumed) == [] and resumed.epoch == 1
    assert list(resumed) == [1, 2] and resumed.epoch == 2


def test_a_state_between_two_epochs_is_the_start_of_the_next() -> None:
    wrapped = tiered.resumable([1, 2])
    list(wrapped)
    resumed = resumed_from(wrapped.state_dict(), [1, 2])
    assert (resumed.epoch, resumed.position) == (1, 0) and list(resumed) == [1, 2] and resumed.epoch == 2


def test_a_pass_that_is_broken_off_keeps_its_place_until_the_next() -> None:
    wrapped = tiered.resumable([1, 2, 3])
    for _ in wrapped:
        break
    assert (wrapped.epoch, wrapped.position) == (0, 1)
    assert list(resumed_from(wrapped.state_dict(), [1, 2, 3])) == [2, 3]
    assert list(wrapped) == [1, 2, 3] and wrapped.epoch == 2


def test_a_state_that_was_loaded_and_not_used_is_given_on() -> None:
    state = stopped(tiered.resumable([1, 2, 3]), 2)
    resumed = resumed_from(state, [1, 2, 3])
    assert encode(resumed.state_dict()) == encode(state) and resumed.position == 2


def test_an_iterator_is_over_when_another_is_made_or_a_state_loaded() -> None:
    wrapped = tiered.resumable([1, 2, 3])
    first = iter(wrapped)
    state = stopped(wrapped, 1)
    with pytest.raises(UsageError, match="this iterator is over"):
        next(first)
    current = iter(wrapped)
    wrapped.load_state_dict(state)
    with pytest.raises(UsageError, match="this iterator is over"):
        next(current)
    rest = iter(wrapped)
    assert [next(rest), next(rest), next(rest, None), next(rest, None)] == [2, 3, None, None]


def test_a_rollback_goes_back_in_the_loader_too(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = list(loader(shuffle=True, num_workers=1))
    torch.manual_seed(7)
    wrapped = tiered.resumable(loader(shuffle=True, num_workers=1))
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store.register("loader", wrapped)
        iterator = iter(wrapped)
        next(iterator)
        store.commit({})
        next(iterator)
        store.rollback()
        rest = list(wrapped)
    assert len(rest) == 3 and all(map(torch.equal, rest, expected[1:]))
    assert wrapped.epoch == 1


def test_a_rollback_counts_the_passes_of_a_sampler_anew(tmp_path: Path) -> None:
    expected = list(loader(sampler=Passes(counts_at_end=True)))
    wrapped = tiered.resumable(loader(sampler=Passes(counts_at_end=True)))
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store.register("loader", wrapped)
        store.commit({})
        assert len([*wrapped, *wrapped]) == 8
        store.rollback()
        assert wrapped.epoch == 0 and all(map(torch.equal, wrapped, expected))


def test_the_length_is_that_of_the_loader_within() -> None:
    assert len(tiered.resumable(loader())) == 4
    with pytest.raises(TypeError, match="len"):
        len(tiered.resumable(Again()))


# -- what is refused, and warned of ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "differences"),
    [
        (lambda: loader(batch_size=3), ["batch_size was 2, is 3", "batches was 4, is 3"]),
        (lambda: loader(shuffle=True), ["sampler was 'BatchSampler of SequentialSampler', is 'BatchSampler of Random"]),
        (lambda: loader(Stream()), ["items was 7, is None", "num_workers was None, is 0"]),
        (lambda: loader(generator=seeded()), ["parts was [], is ['loader.generator'"]),
        (lambda: [1, 2], ["type was 'DataLoader', is 'list'", "batches was 4, is 2"]),
    ],
    ids=["batch_size", "sampler", "data", "generator", "type"],
)
def test_another_loader_is_refused_by_what_differs(plain: Callable[[], Any], differences: list[str]) -> None:
    state = stopped(tiered.resumable(loader()), 1)
    wrapped = tiered.resumable(plain())
    with pytest.raises(UsageError, match="made with another loader") as refusal:
        wrapped.load_state_dict(state)
    assert all(difference in str(refusal.value) for difference in differences)
    assert (wrapped.epoch, wrapped.position) == (0, 0)


@pytest.mark.parametrize(
    ("plain", "facts"),
    [(loader, {"persistent_workers": True}), (Counting, {"batches": None, "parts": None})],
    ids=["workers_that_persist", "a_loader's_own_state"],
)
def test_a_loader_that_0_2_0_committed_otherwise_is_refused_and_left_behind(
    plain: Callable[[], Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    older = tiered.resumable(plain())
    state = older.state_dict()
    older.state_dict = lambda: state | {"loader": state["loader"] | facts}  # type: ignore[method-assign]
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store.register("loader", older)
        store.commit({})
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store.register("loader", tiered.resumable(plain()))
        with pytest.raises(UsageError, match=r"made with another loader: .*store\.drop_state\(name\)"):
            store.resume()
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store.resume()
        store.drop_state("loader")
        store.register("loader", tiered.resumable(plain()))
        store.commit({})


def test_fewer_batches_than_were_used_are_refused() -> None:
    class Fewer(Again):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([item(0)])

    state = stopped(tiered.resumable(Again()), 3) | {"loader": tiered.resumable(Fewer()).state_dict()["loader"]}
    resumed = resumed_from(state, Fewer())
    with pytest.raises(UsageError, match="ends after 1 batches of an epoch of which 3 were used"):
        iter(resumed)
    assert resumed.position == 3


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="another iterable of batches, got int"):
        tiered.resumable(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected persistent_workers=False"):
        tiered.resumable(loader(num_workers=1, persistent_workers=True))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))], ids=["py", "np", "pt"])
def test_draws_in_workers_are_warned_of_once(draw: Draw, caplog: pytest.LogCaptureFixture) -> None:
    wrapped = tiered.resumable(loader(Items(draw), num_workers=1))
    assert len([*wrapped, *wrapped]) == 8
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "replay=True" in caplog.text


class DrawingState(Counting):
    """It draws for each batch."""

    def __iter__(self) -> Iterator[Tensor]:
        for batch in super().__iter__():
            yield batch + random.random()


@pytest.mark.parametrize(
    "plain",
    [
        lambda: loader(Stream(lambda: float(torch.rand(())))),
        lambda: loader(batch_sampler=batches(Hidden()), batch_size=1),
        lambda: loader(sampler=Hidden(), batch_size=None),
        DrawingState,
    ],
    ids=["iterable", "batch_sampler", "sampler", "own_state"],
)
def test_draws_in_turn_with_the_loop_are_warned_of_once(
    plain: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = tiered.resumable(plain())
    for _ in range(2):
        for _ in wrapped:
            torch.rand(1), random.random()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "between batches, as the loop does" in caplog.text


@pytest.mark.parametrize(
    ("plain", "replay"),
    [
        (lambda: loader(num_workers=1, worker_init_fn=np.random.seed), False),  # it draws before the first item only
        (lambda: loader(Items(random.random), num_workers=1), True),
        (lambda: loader(Items(random.random)), False),
        (lambda: loader(Stream(), num_workers=1), False),
    ],
    ids=["no_draws", "replay", "no_workers", "iterable"],
)
def test_what_comes_back_exactly_is_not_warned_of(
    plain: Callable[[], Any], replay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    list(tiered.resumable(plain(), replay=replay))
    assert not caplog.records


def test_the_loader_that_is_given_stays_as_it_is() -> None:
    plain = loader(shuffle=True, num_workers=1)
    before = dict(vars(plain))
    list(tiered.resumable(plain))
    assert vars(plain) == before


@pytest.mark.parametrize("num_before", [2, 3, 4])
def test_without_a_model_later_epochs_are_those_of_the_undisturbed_run(tmp_path: Path, num_before: int) -> None:
    def life(name: str, seed: int, most: int) -> list[list[int]]:
        found: list[list[int]] = []
        with tiered.Store(tmp_path / name, dram="16MiB") as store:
            torch.manual_seed(seed)  # another process begins with other random numbers
            loader = tiered.resumable(DataLoader(range(12), 4, shuffle=True))
            store.register("loader", loader)
            store.resume()
            for _ in range(loader.epoch, 3):
                for batch in loader:
                    found.append(batch.tolist())
                    store.commit()
                    if len(found) == most:
                        return found
        return found

    assert life("cut", 0, num_before) + life("cut", 1, 9) == life("whole", 0, 9)


def test_a_loader_over_another_number_of_ranks_goes_on_behind_the_used_samples() -> None:
    def loaders(world: int) -> list[Any]:
        data = torch.utils.data.TensorDataset(torch.arange(48))
        samplers = [torch.utils.data.DistributedSampler(data, world, rank, seed=3) for rank in range(world)]
        return [tiered.resumable(torch.utils.data.DataLoader(data, 2, sampler=each)) for each in samplers]

    def take(iterators: list[Any], num: int) -> list[int]:
        return sorted(int(x) for _ in range(num) for each in iterators for (batch,) in [next(each)] for x in batch)

    before = loaders(2)
    iterators = [iter(each) for each in before]
    used = take(iterators, 6)
    states = [each.state_dict() for each in before]
    rest = take(iterators, 6)
    for world in (1, 3, 4):
        after = loaders(world)
        for each in after:
            each.load_state_dict(states[0])
        assert take([iter(each) for each in after], 12 // world) == rest
    with pytest.raises(UsageError, match="6 batches of each of 2 ranks are no whole number of batches for 5"):
        loaders(5)[0].load_state_dict(states[1])
    assert sorted(used + rest) == list(range(48))


def test_a_loader_at_the_end_of_an_epoch_is_there_over_another_number_of_ranks(tmp_path: Path) -> None:
    """The last batch of an epoch is a short one: 18 samples are 3 batches of 4 for each of 2 ranks, and 5 for one."""
    data = torch.utils.data.TensorDataset(torch.arange(18))

    def loader(world: int) -> Any:
        sampler = torch.utils.data.DistributedSampler(data, world, 0, shuffle=False)
        return tiered.resumable(torch.utils.data.DataLoader(data, 4, sampler=sampler))

    for before, after in ((2, 1), (1, 2)):
        first, second = loader(before), loader(after)
        states = [first.state_dict() for _ in first]  # after each batch, as a loop commits
        second.load_state_dict(states[-1])
        assert list(second) == [] and second.epoch == 1
        assert len(list(second)) == len(loader(after))
