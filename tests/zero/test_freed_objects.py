"""Facts about freed objects, also where Ctrl-C strikes as they are freed."""

from __future__ import annotations

import gc
import threading

from tests.interrupts import interrupt_at
from tiered.zero.activations.swapped_activations import FreedObjects


class Watched:
    def __init__(self) -> None:
        self.other: Watched | None = None


def test_an_object_in_a_cycle_is_reported_by_the_collection_and_from_any_thread() -> None:
    freed: FreedObjects[int] = FreedObjects()
    watched = Watched()
    watched.other = watched
    freed.watch(watched, 1)
    del watched
    collection = threading.Thread(target=gc.collect)
    collection.start()
    collection.join()
    assert freed and freed.next_freed() == 1 and freed.next_freed() is None


def test_no_line_of_python_runs_as_an_object_is_freed() -> None:
    freed: FreedObjects[int] = FreedObjects()
    watched = [Watched() for _ in range(8)]
    for index, each in enumerate(watched):
        freed.watch(each, index)
    del each
    with interrupt_at(1) as places:
        watched.clear()
    assert places.number == 0
    assert sorted(iter(freed.next_freed, None)) == list(range(8))
