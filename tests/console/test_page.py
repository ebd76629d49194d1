"""Lines and tables that fit the page, whatever is in them."""

from __future__ import annotations

import pytest

from tiered.tools.console import columns, fold, page_width, say


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def test_the_width_is_the_terminals_or_80(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_width() == 60
    monkeypatch.setenv("COLUMNS", "3")
    assert page_width() == 40
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)
    assert page_width() == 80


def test_lines_are_folded_between_words_alone() -> None:
    path = "/a/path/of/the/user's/own/" + "x" * 60
    lines = fold(f"label   {'word ' * 20}{path} end")
    assert max(map(len, lines[:-2])) <= 60 and lines[0].startswith("label   word")
    assert all(line.startswith("        ") for line in lines[1:])
    assert lines[-2:] == [f"        {path}", "        end"]


def test_line_ends_stay(capsys: pytest.CaptureFixture[str]) -> None:
    say("\na", "b\n  c", "")
    assert capsys.readouterr().out == "\na\nb\n  c\n\n"


def test_columns_are_aligned() -> None:
    rows = [("name", "1", "a"), ("other name", "1,000", "")]
    assert list(columns(rows, right=(1,), indent=2)) == ["  name            1  a", "  other name  1,000"]
    assert list(columns([])) == []
