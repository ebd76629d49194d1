"""Rows of pairs: all pairs meet, in few rows, the same in every run."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import pairwise, rows_of_pairs


@pytest.mark.parametrize("sizes", [(28, 2, 2), (4, 2, 2, 2), (3, 3, 3), (5, 1)])
def test_all_pairs_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    product = list(itertools.product(*([f"{place}.{n}" for n in range(size)] for place, size in enumerate(sizes))))
    rows = rows_of_pairs(product)
    met = {pair for row in rows for pair in itertools.combinations(row, 2)}
    assert met == {pair for row in product for pair in itertools.combinations(row, 2)}
    largest, next_largest = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * next_largest <= len(rows) <= 1.5 * largest * next_largest
    assert rows == rows_of_pairs(product)


def test_the_product_is_there_for_a_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    few = pairwise(a="xyz", b=["1", "2"], c={"yes": True, "no": False}).args[1]
    monkeypatch.setenv("TIERED_TEST_PRODUCT", "1")
    assert len(few) < len(pairwise(a="xyz", b=["1", "2"], c={"yes": True, "no": False}).args[1]) == 12
