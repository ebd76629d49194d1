"""GatherPlan, alone: random programs of calls, operations and backwards, against a model of what is gathered."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.zero.parameters.gather_plan import GatherPlan, Moves

ROOT, NUM_UNITS = 0, 6


class Event(NamedTuple):
    """One event of a program: ``word`` says which; ``units`` are those that it is about."""

    word: str
    units: tuple[int, ...] = ()


units = st.integers(ROOT, NUM_UNITS)
events = st.one_of(
    st.builds(lambda unit: Event("call", (unit,)), units),
    st.builds(lambda: Event("return")),
    st.builds(lambda some: Event("operation", tuple(some)), st.lists(units, min_size=1, max_size=4, unique=True)),
    st.builds(lambda some: Event("lend", tuple(some)), st.lists(units, min_size=1, max_size=3, unique=True)),
    st.builds(lambda: Event("take back")),
    st.builds(lambda: Event("backward")),
    st.builds(lambda: Event("forward")),
)
programs = st.lists(events, max_size=60)


class Program:
    """A program that runs by a plan, as the engine does, and checks each move."""

    def __init__(self, num_slots: int, *, keeps: bool) -> None:
        self.plan = GatherPlan(ROOT)
        self.plan.num_slots, self.plan.keeps = num_slots, keeps
        self.gathered: set[int] = set()
        self.calls: list[int] = []
        self.is_in_forward = True
        self.log: list[tuple[str, int]] = []
        self.beyond: set[int] = set()  # units that one operation took beyond the slots
        self.ahead: int | None = None

    def release(self, unit: int) -> None:
        assert unit in self.gathered or unit == self.ahead, "a release has a gather before it"
        assert unit not in self.plan.lent or unit == self.ahead
        self.log.append(("release", unit))
        self.gathered.discard(unit)
        self.ahead = None if self.ahead == unit else self.ahead
        self.beyond.discard(unit)
        self.plan.released(unit)

    def open(self, unit: int, running: set[int]) -> None:
        if unit in self.gathered:
            return
        use = "forward" if self.is_in_forward else "backward"
        moves: Moves[int] = self.plan.open(
            unit, used=set(self.calls), running=running, until_backward=self.is_in_forward, use=use
        )
        self.ahead = None if self.ahead == unit else self.ahead
        assert not running & {*moves.before, *moves.after}, "an operation keeps its units"
        assert ROOT not in (*moves.before, *moves.after) or unit == ROOT
        for each in moves.before:
            self.release(each)
        num_full = sum(each not in {ROOT, *self.beyond, *self.plan.lent} for each in self.gathered)
        takes_slot = unit != ROOT and unit not in self.plan.lent
        if takes_slot and not self.plan.keeps and num_full >= self.plan.num_slots:
            assert running, "only an operation on several units goes beyond the slots"
            self.beyond.add(unit)
        self.gathered.add(unit)
        self.log.append(("gather", unit))
        for each in moves.after:
            self.release(each)
        self.check()
        assert self.ahead is None, "a unit that is gathered ahead is used next, or goes"
        following = self.plan.next_ahead()
        if following is not None:
            assert following not in self.gathered
            self.ahead = following
            self.log.append(("gather ahead", following))
        self.check()

    def check(self) -> None:
        assert set(self.plan.gathered) == self.gathered
        most = NUM_UNITS if self.plan.keeps else self.plan.num_slots
        taken = {*self.gathered, *([] if self.ahead is None else [self.ahead])}
        assert self.plan.ahead == self.ahead
        assert len(taken - {ROOT} - self.beyond - self.plan.lent) <= most

    def run(self, event: Event) -> None:
        if event.word == "call":
            self.calls.append(event.units[0])
            self.open(event.units[0], set())
        elif event.word == "return" and self.calls:
            unit = self.calls.pop()
            if (
                self.plan.last_use(unit, used=set(self.calls), until_backward=self.is_in_forward)
                and unit in self.gathered
            ):
                self.release(unit)
        elif event.word == "operation":
            running: set[int] = set()
            for unit in event.units:
                self.open(unit, running)
                running.add(unit)
                assert running <= self.gathered, "each unit of an operation is gathered when it runs"
        elif event.word == "lend":
            for unit in event.units:
                if unit == self.ahead or (unit in self.gathered and unit not in self.plan.lent):
                    self.release(unit)
                self.plan.lent.add(unit)
                self.open(unit, set())
        elif event.word in ("take back", "backward"):
            lent, self.plan.lent = self.plan.lent, set()
            for unit in lent:
                self.release(unit)
            for unit in self.plan.end() if event.word == "backward" else ():
                self.release(unit)
            self.is_in_forward = self.is_in_forward and event.word != "backward"
        elif event.word == "forward":
            self.is_in_forward = True
        self.check()


@settings(max_examples=400, deadline=None)
@given(programs, st.integers(1, 3), st.booleans())
def test_gathers_and_releases(program: list[Event], num_slots: int, keeps: bool) -> None:
    first, second = (Program(num_slots, keeps=keeps) for _ in range(2))
    for event in program:
        first.run(event)
    for event in program:
        second.run(event)
    assert first.log == second.log, "equal events give equal plans"


@given(st.lists(st.integers(1, NUM_UNITS), min_size=2, max_size=12))
def test_the_second_step_is_foreseen(order: list[int]) -> None:
    """Each unit is expected by the two before it; two steps of one order foresee all of the third."""
    plan = GatherPlan(ROOT)
    pairs = set(zip([order[-1], *order], order, strict=False))
    for step in range(3):
        for unit in order:
            if step == 2 and len(pairs) == len(order) and len(set(order)) == len(order):
                assert plan.coming(1) == [unit]
            plan.open(unit, used=(), running=())
            plan.released(unit)


def test_a_unit_that_could_not_be_gathered_takes_no_slot() -> None:
    plan = GatherPlan(ROOT)
    plan.open(1, used=(), running=())
    plan.released(1)
    assert plan.open(2, used=(), running=()) == Moves((), ())
    assert repr(plan) == "GatherPlan(1 gathered, 1 slots, keeps=False)"
    plan.forget()
    assert not plan.gathered
