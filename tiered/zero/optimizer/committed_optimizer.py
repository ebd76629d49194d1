"""What a commit has of an optimizer beside the buckets, taken apart: anybody's program may have written it.

Each raises ValueError, TypeError or LookupError for what no optimizer writes; the store makes a UsageError of that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.zero.formats.codec import PIECE_ALIGNMENT
from tiered.zero.optimizer.loaded_state import StateDictReader

__all__ = ["bucket_numel_of", "compare", "groups_of", "steps_of", "withhold_steps"]


def bucket_numel_of(committed: dict[str, Any]) -> int:
    """Return the elements in a bucket of a committed optimizer."""
    numel = operator.index(committed["bucket_numel"])
    if numel <= 0 or numel % PIECE_ALIGNMENT:
        raise ValueError(f"buckets of {numel} elements")
    return numel


def steps_of(committed: dict[str, Any], names: Sequence[str]) -> list[int]:
    """Return the step counts of the parameters of these ``names``."""
    steps = [operator.index(committed["steps"][name]) for name in names]
    if any(step < 0 for step in steps):
        raise ValueError(f"a step count of {min(steps)}")
    return steps


def groups_of(
    committed: dict[str, Any], groups: Sequence[dict[str, Any]], reader: StateDictReader
) -> list[dict[str, Any]]:
    """Return ``groups`` with the hyperparameters that were committed, which ``reader`` has checked."""
    found = [group | hyper for group, hyper in zip(groups, committed["hyperparameters"], strict=True)]
    for number, (mine, group) in enumerate(zip(groups, found, strict=True)):
        if group["params"] is not mine["params"]:
            raise ValueError("parameters among the hyperparameters")
        reader.check_values(f"'hyperparameters'[{number}]", group)
    return found


def withhold_steps(store: Store, title: str, steps: Mapping[str, int]) -> None:
    """Keep a close from committing ``steps``, by parameter, under the user's state of earlier ones.

    A run that resumed there would make them twice.
    """
    if not store.durable or not store.state:
        return
    committed = store.registered_state("tiered.optimizer")
    counted = committed.get("steps") if isinstance(committed, dict) else None
    known = counted if isinstance(counted, dict) else {}
    if any(step != known.get(name, 0) for name, step in steps.items()):
        store.withhold_changes(
            f"{title} made steps that the state of generation {store.generation} does not cover, and they are dropped;"
            " expected store.commit(state) after the last step"
        )


def compare(committed: Any, mine: dict[str, Any]) -> None:
    """Raise UsageError with the differences between a committed optimizer and this one."""
    differences = [
        f"{name}: the store has {_short(committed.get(name))}, this optimizer {_short(mine[name])}"
        for name in mine
        if committed.get(name) != mine[name]
    ]
    if differences:
        raise UsageError(
            "the store holds another optimizer: "
            + "; ".join(differences)
            + "; expected the same one, or another directory"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
