"""Ranks begin again together after an abandoned step, and tell each other the ends of commits beside their steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import again  # noqa: F401  # its cases
from tests.ranks.processes import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("calm", ""),
        ("waiting", "StepAbandonedError: .*the loop: ValueError: no such batch"),
        ("in the middle", "no such batch"),
        ("unheard", ""),
        ("departed", "UsageError: the ranks do different things"),
    ],
)
def test_all_go_on_from_wherever_they_were(kind: str, text: str, ranks: Ranks) -> None:
    found = ranks.run("begin_again", kind=kind)
    assert {each["beginnings"] for each in found} == {0 if kind == "calm" else 2}
    assert len({each["done"] for each in found}) == 1, "the numbers of collectives are those of all"
    for rank, each in enumerate(found):
        assert each["owners"] == 0, "no buffer is in use by a collective of before"
        assert (kind == "waiting" and rank == 1) or len(each["errors"]) == (2 if text else 0), found
        assert all(re.search(text, error) for error in each["errors"]), found


def test_they_do_not_begin_again_without_one(ranks: Ranks) -> None:
    found = ranks.run("begin_again_without_one")
    assert found[0] == found[2] == "rank 1 has ended its script or closed its store"


@pytest.mark.parametrize("kind", ["", "abandons"])
def test_the_end_of_a_commit_is_told_also_beside_an_abandoned_step(kind: str, ranks: Ranks) -> None:
    found = ranks.run("tell_in_commit", kind=kind)
    assert all(each["told"] == ["A", "B", "C"] for each in found)
    assert not kind or all(each["looks"] for each in (found[0], found[2])), "and waiting is a sign of life"


@pytest.mark.parametrize(("kind", "text"), [("closes", "rank 1 has ended"), ("late", "came to the end of a commit")])
def test_a_rank_that_does_not_come_to_the_end_of_a_commit_is_an_error(kind: str, text: str, ranks: Ranks) -> None:
    found = ranks.run("tell_in_commit", kind=kind, deadline_s=1.0 if kind == "late" else 20.0)
    errors = [each["error"] for each in (found[0], found[2])]
    assert any(text in each for each in errors), found
    assert all(each.startswith(("RankLostError", "DeviceError: the ranks' connections")) for each in errors), found


def test_a_death_is_named_at_the_end_of_a_commit() -> None:
    with Ranks(3) as ranks:
        ranks.start("tell_in_commit", kind="dies")
        for rank in (0, 2):
            found: Any = ranks.result(rank)
            assert "rank 1 is gone" in found["error"] and found["after_s"] < 15, found
