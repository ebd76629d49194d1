"""What is known of objects that have died, also where Ctrl-C strikes as they do."""

from __future__ import annotations

import gc
import threading

from tests.interrupts import interrupt_at
from tiered.zero.activations.deaths import Deaths


class Watched:
    def __init__(self) -> None:
        self.other: Watched | None = None


def test_facts_come_once_their_object_has_died_in_the_order_of_deaths() -> None:
    deaths: Deaths[str] = Deaths()
    one, two = Watched(), Watched()
    deaths.watch(one, "one")
    deaths.watch(two, "two")
    assert deaths.next() is None and not deaths
    del two, one
    assert deaths
    assert [deaths.next(), deaths.next(), deaths.next()] == ["two", "one", None]


def test_an_object_in_a_cycle_is_reported_by_the_collection_and_from_any_thread() -> None:
    deaths: Deaths[int] = Deaths()
    watched = Watched()
    watched.other = watched
    deaths.watch(watched, 1)
    del watched
    collection = threading.Thread(target=gc.collect)
    collection.start()
    collection.join()
    assert deaths.next() == 1


def test_no_line_of_python_runs_at_a_death_for_an_interrupt_to_end() -> None:
    deaths: Deaths[int] = Deaths()
    watched = [Watched() for _ in range(8)]
    for index, each in enumerate(watched):
        deaths.watch(each, index)
    del each
    with interrupt_at(1) as places:
        watched.clear()
    assert places.number == 0
    assert sorted(iter(deaths.next, None)) == list(range(8))
