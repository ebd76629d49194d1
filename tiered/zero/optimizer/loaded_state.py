"""Optimizer states from outside, looked through before anything is replaced: a malformed one changes nothing.

One is the argument of ``load_state_dict``. The other is the part of a commit that an optimizer keeps beside its
buckets, which any program may have written: its functions raise ValueError, TypeError or LookupError for text that no
optimizer writes, and the store makes a UsageError of that.
optimizer_state.py writes a state that fits, and checks that a master fits its parameter's bytes.
"""

from __future__ import annotations

import copy
import difflib
import logging
import numbers
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.zero.formats.rules import Rule
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.parameters.unit import Segment

__all__ = [
    "RegisteredOptimizer",
    "StateDictReader",
    "bucket_numel_of",
    "compare",
    "given_of",
    "groups_of",
    "managed_of",
    "options_of",
    "steps_of",
    "update_on_of",
    "warn_of_dropped",
    "withhold_steps",
]


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_LARGEST_STEP = 1 << 53
"""The largest step count: torch keeps step counts as floats."""

_TORCH_KEYS = {
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov",
    "base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr", "param_names",
}  # fmt: skip
"""Names that torch's optimizers and schedulers keep in a group beside an optimizer's own hyperparameters."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """``groups`` are whole param groups, the parameters in place; ``states`` has None for a fresh parameter."""

    groups: list[dict[str, Any]]
    states: dict[Segment, Mapping[str, Any] | None]


class StateDictReader:
    """Reads state dicts for an optimizer called ``title``: of ``rule``, over ``groups``, with these ``defaults``.

    ``segments`` has the segment of each parameter. Raises UsageError that names the first value that does not fit;
    reads tensors, writes nothing. One thread at a time.
    """

    def __init__(
        self,
        title: str,
        rule: Rule,
        *,
        groups: Sequence[dict[str, Any]],
        defaults: Mapping[str, Any],
        segments: Mapping[torch.Tensor, Segment],
    ) -> None:
        self._title = title
        self._rule = rule
        self._groups = groups
        self._defaults = defaults
        self._segments = segments

    def read(self, state_dict: object) -> LoadedState:
        """Return the state in ``state_dict``; its tensors are the caller's still, other values copies."""
        whole = self._mapping("the state dict", state_dict)
        self._need("the state dict", whole, ("state", "param_groups"))
        given = self._sequence("'param_groups'", whole["param_groups"])
        if len(given) != len(self._groups):
            self._refuse("'param_groups'", f"{len(self._groups)} groups", f"{len(given)}")
        groups, owners = [], {}
        for number, (mine, theirs) in enumerate(zip(self._groups, given, strict=True)):
            group, ids = self._group(f"'param_groups'[{number}]", mine, theirs)
            for key, parameter in zip(ids, mine["params"], strict=True):
                if key in owners:
                    self._refuse(f"'param_groups'[{number}]['params']", "each id once", f"{_short(key)} twice")
                owners[key] = self._segments[parameter]
            groups.append(group)
        states = self._mapping("'state'", whole["state"])
        for key in states:
            if key not in owners:
                self._refuse("'state'", "ids that a param group names", f"{_short(key)}")
        return LoadedState(groups, {owner: self._state(key, states, owner) for key, owner in owners.items()})

    # -- groups ---------------------------------------------------------------------------------------------------

    def _group(self, where: str, mine: dict[str, Any], theirs: object) -> tuple[dict[str, Any], Sequence[Hashable]]:
        group = dict(self._mapping(where, theirs))
        self._need(where, group, ("params",))
        ids = self._sequence(f"{where}['params']", group["params"])
        if len(ids) != len(mine["params"]):
            self._refuse(f"{where}['params']", f"{len(mine['params'])} parameters", f"{len(ids)}")
        for key in ids:
            if not isinstance(key, Hashable) or isinstance(key, torch.Tensor):
                self._refuse(f"{where}['params']", "ids", _short(key))
        del group["params"]
        known = {*self._defaults, *mine, *_TORCH_KEYS}
        for name in group:
            if name not in known:
                close = difflib.get_close_matches(str(name), sorted(known), 1)
                hint = f", did it mean {close[0]!r}" if close else ""
                self._refuse(where, "hyperparameters that this optimizer has", f"{_short(name)}{hint}")
        for name in (name for name, value in self._defaults.items() if isinstance(value, bool)):
            group.setdefault(name, False)  # older versions of torch lack some
        self.check_values(where, group)
        group = {name: copy.deepcopy(value) for name, value in group.items()}
        group["params"] = mine["params"]
        if "param_names" in mine:
            group.setdefault("param_names", mine["param_names"])
        return group, ids

    def check_values(self, where: str, group: dict[str, Any]) -> None:
        """Raise UsageError unless ``group`` has all hyperparameters, with values that the rule can use."""
        self._need(where, group, self._defaults)
        for name in self._defaults:
            _CHECKS.get(name, _anything)(self, f"{where}[{name!r}]", group[name])
        self._check_together(where, group)
        self._rule.freeze(group)

    def _check_together(self, where: str, group: dict[str, Any]) -> None:
        if group.get("amsgrad"):
            self._refuse(f"{where}['amsgrad']", "False: it keeps no maxima", _short(group["amsgrad"]))
        is_adam = self._rule.name == "AdamW" and not group.get("decoupled_weight_decay", True)
        if is_adam and group["weight_decay"]:
            self._refuse(f"{where}['decoupled_weight_decay']", "True, as AdamW decays", "False, as Adam does")
        if group.get("nesterov") and "dampening" in group and (group["dampening"] != 0 or group["momentum"] <= 0):
            found = f"momentum {group['momentum']}, dampening {group['dampening']}"
            self._refuse(f"{where}['nesterov']", "a momentum and no dampening", found)

    def number(self, where: str, value: object) -> None:
        """Refuse anything but a number that is not below zero, or a tensor of one."""
        if isinstance(value, torch.Tensor) and _is_plain(value) and value.numel() == 1:
            value = value.item()
        if not _is_real(value) or not value >= 0:  # type: ignore[operator]
            self._refuse(where, "a number >= 0", _short(value))

    def any_number(self, where: str, value: object) -> None:
        """Refuse anything but a finite number."""
        if not _is_real(value) or not -torch.inf < value < torch.inf:  # type: ignore[operator]
            self._refuse(where, "a finite number", _short(value))

    def betas(self, where: str, value: object) -> None:
        """Refuse anything but two numbers in [0, 1)."""
        pair = value if isinstance(value, list | tuple) else ()
        if len(pair) != 2 or not all(_is_real(beta) and 0 <= beta < 1 for beta in pair):
            self._refuse(where, "two numbers in [0, 1)", _short(value))

    def switch(self, where: str, value: object) -> None:
        """Refuse anything but True and False."""
        if not isinstance(value, bool):
            self._refuse(where, "True or False", _short(value))

    # -- states ---------------------------------------------------------------------------------------------------

    def _state(self, key: Hashable, states: Mapping[Any, Any], owner: Segment) -> Mapping[str, Any] | None:
        """Return the state of ``owner``; None where torch keeps none, before the first update."""
        where = f"'state'[{_short(key)}], parameter {owner.name}"
        if key not in states:
            return None
        state = self._mapping(where, states[key])
        names = [moment.name for moment in self._rule.moments]
        for name, value in state.items():
            if name not in (*names, "step", "master") and value is not None:
                known = ", ".join(map(repr, ("step", *names)))
                self._refuse(where, f"{known} and, for bf16 parameters, 'master'", _short(name))
        given = {name: value for name, value in state.items() if value is not None}
        if not given:
            return None
        if "step" in given:
            self._step(f"{where}: 'step'", given["step"])
        if self._rule.name == "SGD" and "step" in given:  # it may have had no momentum so far
            names = [name for name in names if name in given]
        self._need(where, given, names if "step" in given or self._rule.name != "AdamW" else (*names, "step"))
        for moment in (moment for moment in self._rule.moments if moment.name in names):
            self._tensor(f"{where}: {moment.name!r}", given[moment.name], owner)
            if moment.is_positive and bool((given[moment.name] < 0).any()):
                self._refuse(f"{where}: {moment.name!r}", "no element below zero", "some")
        if "master" in given:
            self._tensor(f"{where}: 'master'", given["master"], owner)
        return given

    def _step(self, where: str, value: object) -> None:
        if isinstance(value, torch.Tensor) and _is_plain(value) and value.numel() == 1:
            value = value.item()
        if not _is_real(value) or not (0 <= value <= _LARGEST_STEP and value == int(value)):  # type: ignore[operator,call-overload]
            self._refuse(where, "a whole number >= 0", _short(value))

    def _tensor(self, where: str, value: object, owner: Segment) -> None:
        if not isinstance(value, torch.Tensor) or not _is_plain(value) or value.dtype not in _DTYPES:
            self._refuse(where, "a dense tensor of floats", _short(value))
        if value.shape != owner.shape:
            self._refuse(where, f"the parameter's shape {owner.shape}", f"{tuple(value.shape)}")

    # -- any ------------------------------------------------------------------------------------------------------

    def _mapping(self, where: str, value: object) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            self._refuse(where, "a dict", _short(value))
        return value

    def _sequence(self, where: str, value: object) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            self._refuse(where, "a list", _short(value))
        return value

    def _need(self, where: str, found: Mapping[Any, Any], names: Sequence[str] | Mapping[str, Any]) -> None:
        missing = [name for name in names if name not in found]
        if missing:
            self._refuse(where, f"{', '.join(map(repr, missing))}", f"only {_short(list(found))}")

    def _refuse(self, where: str, expected: str, got: str) -> NoReturn:
        raise UsageError(
            f"{self._title}.load_state_dict: {where}: expected {expected}, got {got}; nothing was changed. Load what"
            " state_dict() returned, of this optimizer or torch's own, over the same parameters in the same groups"
        )


def _anything(reader: StateDictReader, where: str, value: object) -> None:
    """Take a hyperparameter as it is."""


_CHECKS: dict[str, Callable[[StateDictReader, str, object], None]] = {
    "lr": StateDictReader.number,
    "eps": StateDictReader.number,
    "weight_decay": StateDictReader.number,
    "momentum": StateDictReader.number,
    "dampening": StateDictReader.any_number,
    "betas": StateDictReader.betas,
    "maximize": StateDictReader.switch,
    "nesterov": StateDictReader.switch,
}


def _is_real(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has numbers that can be read."""
    return value.layout is torch.strided and not value.is_meta and not value.is_quantized and not value.is_complex()


def _short(value: object) -> str:
    """Return a short text of ``value`` for messages; ``value`` may be anything."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)} ({value.layout}, on {value.device})"
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 1 << 64):
        text = repr(value)
    elif isinstance(value, list | tuple) and len(value) <= 20:
        text = f"{type(value).__name__} of {', '.join(map(_short, value)) or 'nothing'}"
    else:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:100]} ... {text[-16:]}"


# -- committed optimizer -----------------------------------------------------------------------------------------------


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
            ", ".join(f"{what} of group {n} is {_brief(has)}, not {_brief(new)}" for n, what, new, has in dropped),
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
        f"{name}: the store has {_brief(committed.get(name))}, this optimizer {_brief(mine[name])}"
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


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
