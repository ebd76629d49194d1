"""A few lives of the campaign of threads (`bench/soak.py --campaign threads`), of each kind of end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.store.histories import History, content
from tests.store.threads import Life


@pytest.mark.parametrize("seed", (0, 1, 2, 6, 9, 15, 17, 38))
def test_what_threads_read_and_what_stays_is_of_one_order(quick_path: Path, seed: int) -> None:
    assert not Life(seed, quick_path).run()


def test_the_check_sees_a_stale_read_a_torn_one_and_generations_that_mix() -> None:
    history = History()
    first = history.begin("0/a", 100)
    history.end(first)
    second = history.begin("0/b", 100)
    history.end(second)
    third = history.begin("0/a", 100)
    history.end(third)
    old, other, new = (content(each.key, each.version, 100) for each in (first, second, third))
    history.read("0/a", history.now(), new)
    history.check_state("this", {"0/a": new, "0/b": other}, history.now(), history.now())
    history.check_reads()
    assert not history.wrong
    history.read("0/a", history.now(), old)
    history.check_reads()
    assert len(history.wrong) == 1
    history.read("0/b", history.now(), torch.cat((other[:50], old[50:])))
    assert len(history.wrong) == 2
    history.check_state("that", {"0/a": new}, 0, history.now())
    assert len(history.wrong) == 3


def test_the_check_sees_shared_keys_whose_reads_have_no_order() -> None:
    history = History()
    writes = [history.begin("a", 100), history.begin("a", 100)]
    for write in writes:
        history.end(write)
    for write in (*writes, writes[0]):
        history.read("a", history.now(), content("a", write.version, 100))
    history.check_reads()
    assert len(history.wrong) == 1
