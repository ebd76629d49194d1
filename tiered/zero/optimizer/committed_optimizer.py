"""The part of a commit that an optimizer keeps beside its buckets, taken apart: any program may have written it.

Each function raises ValueError, TypeError or LookupError for text that no optimizer writes; the store makes a
UsageError of that.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.optimizer.loaded_state import StateDictReader
from tiered.zero.parameters.unit import Segment

__all__ = ["RegisteredOptimizer", "bucket_numel_of", "compare", "given_of", "groups_of", "managed_of", "options_of",
           "steps_of", "update_on_of", "warn_of_dropped", "withhold_steps"]  # fmt: skip


_log = logging.getLogger("tiered")

_MOST_STEPS = 1 << 53  # that a floating number counts singly


class RegisteredOptimizer(NamedTuple):
    """The optimizer as the store sees it: small state that rides along with a commit."""

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


def bucket_numel_of(committed: dict[str, Any]) -> int:
    """Return the elements in a bucket of a committed optimizer."""
    numel = operator.index(committed["bucket_numel"])
    if numel <= 0 or numel % CUT_NUMEL:
        raise ValueError(f"buckets of {numel} elements")
    return numel


def update_on_of(committed: dict[str, Any]) -> str:
    """Return where a committed optimizer computed: "cpu" or "device"."""
    word = committed.get("update_on", "cpu")  # an earlier release knew no other place
    if word not in ("cpu", "device"):
        raise ValueError(f"updates on {word!r}")
    return str(word)


def managed_of(committed: dict[str, Any], segments: Iterable[Segment]) -> list[Collection[Segment]]:
    """Return those of ``segments`` that had state from the start, then each group that got state together later."""
    by_name = {segment.name: segment for segment in segments}
    names = [list(names) for names in committed["managed"]]
    if len({name for each in names for name in each}) != sum(map(len, names)):
        raise ValueError("a parameter with two states")
    return [[by_name[name] for name in each if name in by_name] for each in names]


def steps_of(committed: dict[str, Any], names: Sequence[str]) -> list[int]:
    """Return the step counts of the parameters of these ``names``."""
    steps = [operator.index(committed["steps"][name]) for name in names]
    for step in steps:
        if not 0 <= step < _MOST_STEPS:
            raise ValueError(f"a step count of {step if abs(step) < _MOST_STEPS else 'too many digits'}")
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


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``groups`` without their parameters."""
    return [{k: v for k, v in group.items() if k not in {"params", "param_names"}} for group in groups]


def given_of(committed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of the groups that the committed optimizer was made with."""
    if "given" in committed:
        return [dict(group) for group in committed["given"]]
    hypers = [dict(group) for group in committed["hyperparameters"]]  # an earlier release kept no others
    return [group | {"lr": group.get("initial_lr", group["lr"])} for group in hypers]


def warn_of_dropped(
    title: str,
    given: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Log one warning of the options that are ``given`` anew and that ``groups``, the resumed ones, do not have.

    An option that is given as it was ``before`` is not new: a schedule has changed the committed value.
    """
    dropped = [
        (number, name, value, group[name])
        for number, (mine, old, group) in enumerate(zip(given, before, groups, strict=True))
        for name, value in mine.items()
        if name in group and _comparable(value) not in (_comparable(old.get(name)), _comparable(group[name]))
    ]
    if dropped:
        number, name, value, _ = dropped[0]
        _log.warning(
            "%s: the resumed run keeps the options of its commit: %s; to change one, set it after store.resume():"
            " optimizer.param_groups[%d][%r] = %r, and a scheduler's base_lrs with lr",
            title,
            ", ".join(f"{what} of group {n} is {_short(has)}, not {_short(new)}" for n, what, new, has in dropped),
            number, name, value,
        )  # fmt: skip


def _comparable(value: Any) -> str:
    """Return a text that equal options have in common: a commit need not have the types that were given."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return str([_comparable(each) for each in value])
    return repr(float(value) if isinstance(value, int | float) else value)


def withhold_steps(store: Store, title: str, steps: Mapping[str, int]) -> None:
    """Keep a close from committing ``steps``, by parameter, under the user's state of earlier ones.

    A run that resumed from such a commit would make these steps twice.
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
            f"the store holds another optimizer: {'; '.join(differences)}; expected the same one, with the groups that"
            " its run has added (optimizer.add_param_group before store.resume()); another begins in another directory,"
            " with weights= from `tiered export RUN FOLDER`, and for another state= with optimizer.load_state_dict() of"
            " the first one's state_dict()"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
