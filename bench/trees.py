"""Another checkout of this repository as the other side of a pair: `--against tree=CHECKOUT` of the benches.

A side runs in a process of its own, whose ``tiered`` is the checkout's: PYTHONPATH names the checkout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["HERE", "checkout", "environment", "medians", "pairs", "run"]

HERE = Path(__file__).resolve().parents[1]


def checkout(against: str) -> Path:
    """Return the checkout that ``against``, "tree=CHECKOUT", names; raise SystemExit if the checkout has no tiered."""
    name, _, value = against.partition("=")
    tree = Path(value).resolve()
    if name != "tree" or not value:
        raise SystemExit(f"--against {against}: expected tree=CHECKOUT")
    probe = [sys.executable, "-c", "import tiered; print(tiered.__file__)"]
    found = subprocess.run(probe, env=environment(tree), cwd=tree if tree.is_dir() else None, text=True, stdout=-1)
    if found.stdout.strip() != str(tree / "tiered" / "__init__.py"):
        raise SystemExit(f"--against {against}: `import tiered` there finds {found.stdout.strip() or 'nothing'}")
    return tree


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process whose ``tiered`` is that of ``tree``."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))}


def run(tree: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run Python with ``arguments`` and the ``tiered`` of ``tree``; return the JSON of the last printed line."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(tree), check=True, stdout=subprocess.PIPE, text=True, timeout=7200
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def pairs(num: int, other: Path, measure: Callable[[Path], dict[str, float]]) -> list[dict[str, dict[str, float]]]:
    """Measure this tree ("ours") and ``other`` ("against") ``num`` times, the other first in every second pair."""
    sides = {"ours": HERE, "against": other}
    order = [list(sides), [*reversed(sides)]]
    return [{name: measure(sides[name]) for name in order[number % 2]} for number in range(num)]


def medians(found: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Return, for each figure of pairs, the median of both sides and of the pairs' ratios, and all the ratios."""
    rows: dict[str, dict[str, Any]] = {}
    for name in found[0]["ours"]:
        ours, against = ([pair[side][name] for pair in found] for side in ("ours", "against"))
        ratios = [a / b if b else float("nan") for a, b in zip(ours, against, strict=True)]
        rows[name] = {
            "ours": statistics.median(ours),
            "against": statistics.median(against),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return rows
