"""The soak sees what grows and what stays; one short life of it runs here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rigs.available import needs
from tests.rigs.endurance import complaint, endurance, slope_kib
from tiered.units import MiB


def samples(number: int = 60, **grown: int) -> list[dict[str, Any]]:
    """Return what a steady process says, but for what ``grown`` adds in each cycle."""
    steady = {"rss_kib": 100_000, "descriptors": 9, "threads": 1}
    return [
        {"cycle": cycle, "left": [], **{name: value + cycle * grown.get(name, 0) for name, value in steady.items()}}
        for cycle in range(number)
    ]


def test_a_steady_process_is_well() -> None:
    assert complaint(samples()) == ""
    assert slope_kib([5.0] * 40) == 0


@pytest.mark.parametrize("name", ["rss_kib", "descriptors", "threads"])
def test_what_grows_is_seen(name: str) -> None:
    grown = samples(**{name: 300 if name == "rss_kib" else 1})
    assert ("memory" if name == "rss_kib" else name) in complaint(grown)


def test_what_is_left_behind_is_seen() -> None:
    found = samples()
    found[3]["left"] = ["store-3"]
    assert complaint(found) == "3 left ['store-3']"


@needs("blkio cgroup")
def test_a_short_life_of_it() -> None:
    with endurance(384 * MiB, 0) as life:
        assert life.run([1]) == ""
        assert [sample["cycle"] for sample in life.samples] == [1]
