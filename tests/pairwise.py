"""Parameters of a test whose product takes too long: rows in which any two values of two parameters meet once.

``TIERED_TEST_PRODUCT=1`` has all of the product, for a campaign by hand: CONTRIBUTING says the command.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["pairwise", "rows_of_pairs"]


def pairwise(**parameters: Mapping[str, Any] | Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test by ``parameters``: values by their ids, or values that are their own."""
    values = [each if isinstance(each, Mapping) else {str(one): one for one in each} for each in parameters.values()]
    ids = list(itertools.product(*values))
    if not os.environ.get("TIERED_TEST_PRODUCT"):
        ids = rows_of_pairs(ids)
    rows = [
        pytest.param(*(by_id[one] for by_id, one in zip(values, row, strict=True)), id="-".join(row)) for row in ids
    ]
    return pytest.mark.parametrize(tuple(parameters), rows)


def rows_of_pairs(product: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows of ``product`` that have every pair of it; the same ones in every run.

    One after the other is taken that adds most pairs; of several, one by lot, so that no two values always go together.
    """
    draw = random.Random(7)
    lacking = {pair for row in product for pair in _pairs(row)}
    rows: list[tuple[str, ...]] = []
    left = list(product)
    draw.shuffle(left)
    while lacking:
        best = max(left, key=lambda row: len(lacking & _pairs(row)))
        rows.append(best)
        left.remove(best)
        lacking -= _pairs(best)
    return sorted(rows, key=product.index)


def _pairs(row: tuple[str, ...]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(itertools.combinations(enumerate(row), 2))
