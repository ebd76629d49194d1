"""docs/remedies.md has one row for each message that names a way out of tiered's own, with tests that take the way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_fault_table import missing
from tests.test_names import FILES, parsed

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs/remedies.md").read_text().splitlines() if line.startswith("| ")][1:]
ELSEWHERE = {"doctor", "removed.py"}  # advice on machines; names that went, which test_removed.py has

WAY = re.compile(
    r"""
    \bstore\.(?:commit|rollback|resume|close|drop_state)\(
    | \boptimizer\.(?:reset_state|state_dict|load_state_dict)\( | \bmodel\.state_dict\( | \bstate_dict\(\)\ of\b
    | \b(?:rollback|resume|reset_state|drop_damaged|drop_state)\(\)
    | (?<=[ `])tiered\.[A-Za-z_]+\(
    | (?:[:;(]\ |\bor\ |`)tiered\ (?:verify|gc|export|import|inspect|bench|doctor|train)\b
    | (?:\b(?:add|leave|say|or|another|are|give|command|anew\ with|it\ with|data\ with)|[:,])\ --[a-z]
    """,
    re.VERBOSE,
)
"""A call, a command or an option of tiered that a message tells its reader to use."""


def literals(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in ``tree``, "{}" for what is put into one; no docstrings."""
    inside = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in node.values}
    inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@cache
def messages() -> list[str]:
    """Return the texts of the package that name a way; a call alone is the name of what was called."""
    files = [file for file in FILES if ELSEWHERE.isdisjoint(file.parts)]
    texts = [text for file in files for text in literals(parsed(file))]
    return [" ".join(text.split()) for text in texts if " " in text and WAY.search(text)]


def phrase(row: str) -> str:
    return row.split("|")[1].strip()


@pytest.mark.parametrize("row", ROWS, ids=phrase)
def test_every_remedy_stands_in_one_message_and_has_tests_that_exist(row: str) -> None:
    assert sum(phrase(row) in text for text in messages()) == 1
    assert not missing(row)


def test_every_message_that_names_a_way_has_a_row() -> None:
    assert [text for text in messages() if sum(phrase(row) in text for row in ROWS) != 1] == []


def test_what_names_a_way_is_seen() -> None:
    assert len(ROWS) > 60
    source = 'def f(x):\n    """expected store.rollback()"""\n    raise E(f"{x} failed; " f"expected store.{x}()")'
    assert list(literals(ast.parse(source))) == ["{} failed; expected store.{}()"]
    for text in ("{} failed; expected store.rollback()", "look with `tiered inspect RUN`", "no terminal: add --yes"):
        assert WAY.search(text)
    for text in ("store.get() failed: {}", "tiered trains models", "--steps must be at least 1"):
        assert not WAY.search(text)
