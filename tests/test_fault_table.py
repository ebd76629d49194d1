"""docs/faults.md names tests that exist, for every fault."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]


@cache
def names_in(file: Path) -> set[str]:
    """Return what ``file`` defines, methods as ``Class::method``."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def missing(row: str) -> list[str]:
    """Return the ids in the last column of ``row`` that do not exist; a row without any is missing all."""
    ids = re.findall(r"`((?:tests|bench)/[^` ]+\.py[^` ]*)`", row.split("|")[3])
    if not ids:
        return [row]
    parts = [(one, ROOT / one.partition("::")[0], one.partition("::")[2]) for one in ids]
    return [one for one, file, name in parts if not file.is_file() or (name and name not in names_in(file))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_fault_has_tests_that_exist(row: str) -> None:
    assert not missing(row)


def test_what_does_not_exist_is_seen() -> None:
    assert len(ROWS) > 30
    assert missing("| a | b | nothing |")
    assert missing("| a | b | `tests/test_names.py::test_of_a_dream` |")
    row = "| a | b | `tests/test_dream.py::test_a`, `tests/test_names.py` |"
    assert missing(row) == ["tests/test_dream.py::test_a"]
