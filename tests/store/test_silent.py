"""What a drive does wrong and reports as done is found at the next read; what it does by half is gone on with."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.store.places import quick_directory
from tests.store.silent import KINDS, try_cases, try_short
from tiered.store.transfers.checked_transfer import Transfer

NUM_JOBS, NUM_CASES = 10, 24


def test_every_transfer_that_went_wrong_in_silence_is_found() -> None:
    tried = [each for seed in range(NUM_JOBS) for each in try_cases(seed, NUM_CASES)]
    assert not [(case, outcome.wrong) for case, outcome in tried if outcome.wrong]
    assert len(tried) == NUM_JOBS * NUM_CASES and all(outcome.refused for _, outcome in tried)
    assert min(Counter(case.kind for case, _ in tried)[kind] for kind in KINDS) >= 5


def test_short_transfers_are_gone_on_with_on_every_engine() -> None:
    with quick_directory() as place:
        outcomes = [try_short(seed, place) for seed in range(10)]
    assert not [wrong for _, wrong in outcomes if wrong]
    assert min(num_short for num_short, _ in outcomes) > 5


def test_the_cases_see_a_missing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "_check", lambda transfer, block: None)
    assert any("other bytes" in outcome.wrong for seed in range(3) for _, outcome in try_cases(seed, NUM_CASES))
