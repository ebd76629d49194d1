"""One commit over several stores: whatever crashes, all have the newest generation whole, or all the one before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.devices.simulated_disk import SimulatedDisk
from tests.store import meeting
from tests.store.meeting import NUM_OPERATIONS, Crash, Meeting, Member, wrong_after
from tests.store.rig import await_true, beside, numbers
from tiered.errors import CorruptionError, DeviceError, LeaseError, UsageError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.store import Store


@pytest.mark.parametrize("operation", range(NUM_OPERATIONS + 1))
def test_a_crash_of_either_rank_and_another_in_the_opening_leave_one_generation(operation: int) -> None:
    draw = random.Random(operation)
    for rank in (0, 1):
        crash = Crash(rank, operation, draw.choice(("drop", "keep", "subset", "torn")), draw.choice((2, 2, 3)))
        assert not (wrong := wrong_after(crash, crash_again=draw.randrange(-1, 2))), (crash, wrong)


@pytest.mark.parametrize(("world", "operation"), [(2, 8), (3, 11)])
def test_a_crash_of_each_rank_where_the_opening_discards_a_generation(world: int, operation: int) -> None:
    """All operations of the job: `bench/soak.py --campaign opening`."""
    num_openings, wrong = meeting.wrong_in_discards(world, operation)
    assert not wrong and num_openings == 2 * world * (world + 1)


def test_no_space_on_one_rank_is_named_on_all_and_the_generation_before_is_opened() -> None:
    meeting.no_space_names_the_rank()


def test_the_newest_generation_of_all_is_opened() -> None:
    meeting.a_confirmed_generation_is_opened()
    meeting.the_nonce_is_compared()


def test_a_commit_that_waits_for_another_rank_shows_signs_of_life() -> None:
    """The deadline of a store is that of its drives: the time that it waits for a rank does not count."""
    stores: dict[int, Store] = {}

    def waits_long() -> bool:
        sealed = stores[0].working_set.sealed
        return sealed is not None and sealed.phase > 9  # three are of its own

    def act(store: Store, rank: int) -> None:
        stores[rank] = store
        store["a"] = numbers(6000, rank)
        if rank:
            flush = store.working_set.space.flush
            store.working_set.space.flush = lambda: (await_true(waits_long), flush())  # type: ignore[method-assign]
        store.commit()

    assert meeting.run_all([SimulatedDisk(), SimulatedDisk()], act) == ["", ""]


# -- the confirmation by itself ----------------------------------------------------------------------------------------


def confirmations(world: int = 2) -> list[RanksConfirmation]:
    there = Meeting(world)
    return [RanksConfirmation(cast(Any, Member(there, rank, SimulatedDisk()))) for rank in range(world)]


def each(act: Callable[[RanksConfirmation, int], object], ranks: list[RanksConfirmation]) -> list[Any]:
    """Return what ``act`` returns, or raises, for each rank, in a thread of its own."""
    found: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            found[rank] = act(ranks[rank], rank)
        except Exception as error:
            found[rank] = error

    with beside(*(lambda rank=rank: run(rank) for rank in range(len(ranks)))):
        pass
    return found


def assert_same_error(found: list[Any], kind: type[Exception], *words: str) -> None:
    assert {str(error) for error in found} == {str(found[0])} and all(type(error) is kind for error in found), found
    assert all(word in str(found[0]) for word in words), found[0]


def test_new_stores_are_of_one_run() -> None:
    ranks = confirmations(3)
    runs = each(lambda each, _: each.join(b"", 0), ranks)
    assert len(set(runs)) == 1 and len(runs[0]) == 16
    assert [str(each.member) for each in ranks] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert all(each.member is not None and each.member.run == runs[0] for each in ranks)


def test_a_creation_that_was_cut_short_on_one_rank_is_finished_in_the_run_of_the_other() -> None:
    assert each(lambda each, rank: each.join(b"r" * 16 if rank else b"", 0), confirmations()) == [b"r" * 16] * 2


@pytest.mark.parametrize("kind", ["lost", "foreign"])
def test_directories_that_do_not_belong_together_are_refused_on_all_ranks(kind: str) -> None:
    own, other = b"r" * 16, b"" if kind == "lost" else b"s" * 16
    found = each(lambda each, rank: each.join(other if rank else own, 0 if rank else 5), confirmations())
    there = "rank 1 has no store" if kind == "lost" else f"rank 1 has generation 0 of run {other.hex()}"
    assert_same_error(
        found, UsageError, f"rank 0 has generation 5 of run {own.hex()}", there, "restore what is missing"
    )


def test_ranks_without_a_generation_in_common_are_refused() -> None:
    kept = [[GenerationName(9, 1), GenerationName(8, 2)], [GenerationName(6, 4)]]
    found = each(lambda each, rank: each.choose(kept[rank]), confirmations())
    assert_same_error(found, CorruptionError, "rank 0: 9 (0000000000000001), 8 (", "rank 1: 6 (", "older copies")


def test_all_have_the_nonce_of_rank_0() -> None:
    found = each(lambda each, rank: each.propose(1, {"tiered.optimizer": 3}, ""), confirmations(3))
    assert len(set(found)) == 1 and isinstance(found[0], int)


@pytest.mark.parametrize(("numbers", "steps"), [((2, 2), (3, 4)), ((2, 3), (3, 3))])
def test_ranks_at_different_steps_refuse_the_commit_together(numbers: Any, steps: Any) -> None:
    found = each(lambda each, rank: each.propose(numbers[rank], {"o": steps[rank]}, ""), confirmations())
    assert_same_error(found, UsageError, f"rank 1 is at generation {numbers[1]} with the steps {{'o': {steps[1]}}}")


@pytest.mark.parametrize(
    ("refusal", "kind", "text"),
    [("LeaseError: 'a' is leased", LeaseError, "'a' is leased"), ("OddError: no", UsageError, "OddError: no")],
)
def test_a_refusal_of_one_rank_is_raised_by_all_in_its_class(refusal: str, kind: Any, text: str) -> None:
    found = each(lambda each, rank: each.propose(1, {}, refusal if rank else ""), confirmations())
    assert_same_error(found, kind, "store.commit() failed on 1 of the ranks: rank 1", text)


def test_an_interrupted_proposal_ends_the_run_on_all_ranks() -> None:
    ranks = confirmations()

    def interrupt(word: str, payload: bytes) -> Any:
        raise KeyboardInterrupt

    ranks[0]._ranks.agree = interrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        ranks[0].propose(1, {}, "")
    with pytest.raises(DeviceError, match="rank 0 is gone"):
        ranks[1].propose(1, {}, "")


def test_second_phases_come_in_the_order_of_the_proposals() -> None:
    """A seal that is called off, in the thread that was to seal, waits for the generation before to be confirmed."""
    ranks, looks = confirmations(), threading.Event()
    names = [GenerationName(n, each(lambda each, rank, n=n: each.propose(n, {}, ""), ranks)[0]) for n in (1, 2)]
    told: list[str] = []

    def call_off() -> None:
        ranks[0].failed(2, ValueError("late"))
        told.append("called off")

    def confirm_both(rank: RanksConfirmation) -> None:
        rank.confirm(names[0], lambda: None)
        told.append("confirmed")
        with pytest.raises(DeviceError, match="generation 2 is lost because rank 0: ValueError: late"):
            rank.confirm(names[1], lambda: None)

    with beside(call_off):
        looks.wait(0.2)
        assert not told
        with beside(lambda: confirm_both(ranks[1])):
            ranks[0].confirm(names[0], lambda: None)
    assert told == ["confirmed", "called off"] and "0 generations" in repr(ranks[0])


def test_a_failure_that_cannot_be_told_is_the_stores_own_alone() -> None:
    ranks = confirmations()
    each(lambda each, _: each.propose(1, {}, ""), ranks)
    ranks[1]._ranks.leave(ValueError(), "")
    ranks[0].failed(1, ValueError("here"))


def test_all_commit_at_the_end_where_one_has_changes_and_none_where_one_has_failed() -> None:
    assert each(lambda each, rank: each.is_to_commit_at_end(rank == 1, None), confirmations(3)) == [True] * 3
    assert each(lambda each, rank: each.is_to_commit_at_end(False, None), confirmations()) == [False] * 2
    failed = each(
        lambda each, rank: each.is_to_commit_at_end(True, LeaseError("'a'") if rank else None), confirmations()
    )
    assert_same_error(failed, LeaseError, "store.close() failed on 1 of the ranks: rank 1: 'a'")
