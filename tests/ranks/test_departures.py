"""A rank that does something else than the others is named on all of them, and no byte is moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pairwise import pairwise
from tests.ranks.departures import AT_ONCE, AWAY, complaints, is_untouched
from tests.ranks.processes import Ranks

WITHIN_S = 15.0  # beside a load of 12; bench/ranks.py has the second


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pairwise(kind=AT_ONCE, world=("2", "3", "4"), sizes=("equal", "other"))
def test_a_departure_is_an_error_on_every_rank(kind: str, world: str, sizes: str, ranks: Ranks) -> None:
    seen = ranks.run("depart", kind=kind, world=int(world), are_equal=sizes == "equal")
    assert not complaints(kind, seen[: int(world)], within_s=WITHIN_S)


@pytest.mark.parametrize(("kind", "world"), [(AWAY[0], 2), (AWAY[0], 4), (AWAY[1], 3)])
def test_a_rank_that_stays_away_is_missed_at_the_deadline(kind: str, world: int, ranks: Ranks) -> None:
    seen = ranks.run("depart", kind=kind, world=world, are_equal=world == 3)
    assert not complaints(kind, seen[:world], within_s=WITHIN_S)


@pytest.mark.parametrize("kind", ["other unit", "other order", "other kind"])
def test_a_mutant_that_agrees_after_the_bytes_moves_them(kind: str, ranks: Ranks) -> None:
    seen = ranks.run("depart", kind=kind, world=3, are_equal=True, mutant="bytes first", deadline_s=1.5)
    assert not is_untouched(seen[:3])


def test_a_mutant_without_its_watch_knows_an_end_at_the_deadline_only(ranks: Ranks) -> None:
    kind = "end of the script"
    assert kind in AT_ONCE
    seen = ranks.run("depart", kind=kind, world=3, are_equal=True, mutant="watch off", deadline_s=1.5)
    assert all("did not come" in seen[rank]["text"] for rank in (0, 2))
    seen = ranks.run("depart", kind=kind, world=3, are_equal=True)
    assert all("has ended its script" in seen[rank]["text"] for rank in (0, 2))
