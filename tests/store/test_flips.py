"""A flipped bit in any file of a store is found, naming key, file and offset, or it harms nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.store.flips import CLASSES, Killed, Subject, draw, try_flip
from tests.store.places import quick_directory
from tiered.store.transfers.checked_transfer import Transfer

NUM_FLIPS = 250  # the campaign has thousands


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with quick_directory() as place:
        yield Subject(place)


def tried(subject: Subject, seed: int, num: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Try so many flips; return how many of each class were found or harmless, and what went wrong."""
    rng, counts, wrong = random.Random(seed), Counter[tuple[str, str]](), []
    for _ in range(num):
        flip = draw(subject, rng)
        outcome, what = try_flip(subject, flip)
        counts[flip.kind, outcome] += 1
        wrong += [what] if what else []
    return counts, wrong


def test_every_flipped_bit_is_found_or_harms_nothing(subject: Subject) -> None:
    counts, wrong = tried(subject, 0, NUM_FLIPS)
    assert not wrong
    found, harmless = ({kind: counts[kind, outcome] for kind in CLASSES} for outcome in ("detected", "harmless"))
    assert sum(counts.values()) == sum(found.values()) + sum(harmless.values()) == NUM_FLIPS
    # What is read is checked; what nobody reads, or only takes advice from, refuses nothing.
    assert harmless["identity"] == 0 < found["identity"]
    assert min(found["data in use"], found["catalog"], found["catalog of two generations"], found["journal"]) > 5
    assert not any(found[kind] for kind in ("data not in use", "lock", "profile", "ledger"))
    assert min(harmless[kind] for kind in ("data not in use", "lock", "profile", "ledger")) > 5


@pytest.mark.parametrize("killed", ["", "early", "torn", "late"])
def test_without_a_flip_nothing_is_damaged(subject: Subject, killed: Killed) -> None:
    subject.restore(subject.images[killed])
    with subject.open() as store:
        assert store.generation == 3  # the journal was played back, whatever pages the killed commit had written
        assert store.state == subject.states[3] and set(store) == set(subject.contents[3])
        assert store.verify().is_clean


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("chosen", [None, 3, 4])
def test_without_a_flip_both_generations_are_whole(subject: Subject, chosen: int | None, mode: str) -> None:
    subject.restore(subject.images["unconfirmed"])
    generation = chosen or 4
    with subject.open(mode, chosen) as store:
        assert store.generation == generation
        assert store.state == subject.states[generation] and set(store) == set(subject.contents[generation])
        assert store.verify().is_clean


def test_the_flips_see_a_missing_check(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "_check", lambda transfer, block: None)
    assert any("other bytes" in wrong for wrong in tried(subject, 1, 60)[1])
