"""Imports point down the floors of the house; 3a and 3b never import each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tiered"

FLOORS = {
    "units": 0,
    "errors": 0,
    "stats": 0,
    "bytes": 1,
    "store": 2,
    "tiers": 3,
    "ranks": 3,
    "zero": 4,
    "cli": 5,
    "console": 5,
    "doctor": 5,
    "train": 5,
    "measure": 5,
    "plan": 5,
    "report": 5,
    "interop": 5,
    "": 5,  # the package's own __init__
}


def room(module: str) -> str:
    """Return the room of ``tiered.room.anything``: "" for the package itself."""
    return [*module.split("."), ""][1]


def imported(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Return the full names of the modules of tiered that ``source``, the text of ``module``, imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import; say the full name"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "tiered" else {base}
    return {name for name in found if name.split(".")[0] == "tiered"}


def complaints(source: str, module: str) -> list[str]:
    """Return the imports of ``module`` that do not point down."""
    here = room(module)
    found = []
    for name in sorted(imported(source, module)):
        there = room(name) if room(name) in FLOORS else ""  # `from tiered import Store` is the package itself
        if there == here:
            continue
        if FLOORS[there] > FLOORS[here] or (FLOORS[there] == FLOORS[here] < 5):
            found.append(f"{module} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})")
    return found


def modules() -> list[tuple[str, Path]]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(part for part in parts if part != "__init__"), file))
    return found


@pytest.mark.parametrize(("module", "file"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_down(module: str, file: Path) -> None:
    assert room(module) in FLOORS, f"{module} is on no floor of the house"
    assert not complaints(file.read_text(), module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tiered.bytes.arena", "from tiered.store.store import Store"),
        ("tiered.tiers.trace", "import tiered.ranks.comm"),
        ("tiered.ranks.comm", "from tiered.tiers import trace"),
        ("tiered.store.store", "def later():\n    import tiered.zero.shard"),
        ("tiered.zero.shard", "from tiered import Store"),
        ("tiered.units", "from tiered.errors import UsageError"),
    ],
)
def test_imports_that_do_not_point_down_are_found(module: str, source: str) -> None:
    assert complaints(source, module)


def test_floors_of_the_same_height_above_the_store_may_know_each_other() -> None:
    assert not complaints("import tiered\nfrom tiered.zero import shard\nfrom tiered.train import loop", "tiered.cli")
