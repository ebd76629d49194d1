"""The state of an optimizer as dicts: read out, loaded, reset, and the part of a commit beside the buckets.

Two kinds come from outside: the argument of ``load_state_dict``, and what a commit has, which any program may have
written. One reader looks both through before anything is replaced: a malformed one changes nothing. For text that no
optimizer writes the functions here raise ValueError, TypeError or LookupError, and the store makes a UsageError of it.
optimizer_state.py writes a state that fits, and checks that a master fits its parameter's bytes.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import logging
import numbers
import operator
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.zero.engine import Engine
from tiered.zero.formats.rules import Rule
from tiered.zero.layout import CUT_NUMEL
from tiered.zero.optimizer.optimizer_state import OptimizerState, StateUnit
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.unit import Segment

__all__ = [
    "StateAccess",
    "StateReader",
    "compare",
    "given_of",
    "layout_of",
    "misfits",
    "options_of",
    "warn_of_dropped",
    "withhold_steps",
]

_log = logging.getLogger("tiered")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_LARGEST_STEP = 1 << 53
"""The largest step count: torch keeps step counts as floats."""

_TORCH_OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": True,
              "decoupled_weight_decay": True},
    "SGD": {"foreach": None, "differentiable": False, "fused": True},
}  # fmt: skip
"""Options of torch's own that a state dict has: torch replaces the target's by them, and the bits are fused ones."""

_TORCH_KEYS = {
    "amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov",
    "base_momentum", "initial_lr", "max_lr", "max_momentum", "min_lr", "swa_lr", "param_names",
}  # fmt: skip
"""Names that torch's optimizers and schedulers keep in a group beside an optimizer's own hyperparameters."""


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def _is_real(value: Any) -> bool:
    """Whether ``value`` is a number, and a float could be that large."""
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value
    return is_number and not (isinstance(value, int) and abs(value) > sys.float_info.max)


def _item(value: Any) -> Any:
    """Return the number in a tensor of one; other values as they are."""
    return value.item() if isinstance(value, torch.Tensor) and _is_plain(value) and value.numel() == 1 else value


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor has numbers that can be read."""
    return value.layout is torch.strided and not value.is_meta and not value.is_quantized and not value.is_complex()


def _are_betas(value: Any) -> bool:
    pair = value if isinstance(value, list | tuple) else ()
    return len(pair) == 2 and all(_is_real(beta) and 0 <= beta < 1 for beta in pair)


_POSITIVE = "a number >= 0", lambda value: _is_real(_item(value)) and _item(value) >= 0
_SWITCH = "True or False", lambda value: isinstance(value, bool)

_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": _POSITIVE,
    "eps": _POSITIVE,
    "weight_decay": _POSITIVE,
    "momentum": _POSITIVE,
    "dampening": ("a finite number", lambda value: _is_real(value) and -torch.inf < value < torch.inf),
    "betas": ("two numbers in [0, 1)", _are_betas),
    "maximize": _SWITCH,
    "nesterov": _SWITCH,
    "amsgrad": ("False: it keeps no maxima", lambda value: isinstance(value, int | None) and not value),
}
"""The values that a hyperparameter may have: in words, and a function that tells whether a value fits."""


def misfits(rule: Rule, group: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each hyperparameter in ``group`` that ``rule`` cannot use: its name, what was expected, what was found."""
    for name, (expected, fits) in _VALUES.items():
        if name in group and not fits(group[name]):
            yield name, expected, _short(group[name])
    if rule.name == "AdamW" and group.get("decoupled_weight_decay", True) is False and group["weight_decay"]:
        yield "decoupled_weight_decay", "True, as AdamW decays", "False, as Adam does"
    if group.get("nesterov") is True and "dampening" in group and (group["dampening"] != 0 or group["momentum"] <= 0):
        found = f"momentum {group['momentum']}, dampening {group['dampening']}"
        yield "nesterov", "a momentum and no dampening", found


# -- reader ------------------------------------------------------------------------------------------------------------


class _MisfitError(ValueError):
    """A value from outside does not fit."""


States = dict[Segment, Mapping[str, Any] | None]
"""The state of each parameter; None for a fresh one."""


class StateReader:
    """Reads states for an optimizer called ``title``: of ``rule``, over ``groups``, with these ``defaults``.

    ``segments`` has the segment of each parameter. The error names the first value that does not fit. Reads tensors,
    writes nothing. One thread at a time.
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

    def loaded(self, state_dict: object) -> tuple[list[dict[str, Any]], States]:
        """Return the whole groups, parameters in place, and the states in ``state_dict``. Raises UsageError.

        The tensors are the caller's still, other values copies.
        """
        with self._refusing():
            return self._loaded(state_dict)

    def groups(
        self, given: object, ids: Sequence[Sequence[Hashable]], steps: Mapping[str, torch.Tensor]
    ) -> list[dict[str, Any]]:
        """Return the whole groups of ``given``, whose parameters go by these ``ids``, and check step counts.

        Raises UsageError as ``loaded`` does.
        """
        found = []
        with self._refusing():
            for number, (mine, theirs) in enumerate(zip(self._groups, _sequence("'param_groups'", given), strict=True)):
                where = f"'param_groups'[{number}]"
                group, its = self._group(where, mine, theirs)
                if list(its) != list(ids[number]):
                    _refuse(f"{where}['params']", _short(ids[number]), _short(its))
                found.append(mine | group)
            for name, value in steps.items():
                _step(f"'state'[{name!r}]: 'step'", value)
        return found

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except _MisfitError as error:
            raise UsageError(
                f"{self._title}: {error}; nothing was changed. Load what state_dict() returned, of this"
                " optimizer or torch's own, over the same parameters in the same groups"
            ) from None

    def committed(self, state: Mapping[str, Any], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the groups with the hyperparameters of a committed state, and the step counts of these ``names``."""
        groups = [mine | hyper for mine, hyper in zip(self._groups, state["hyperparameters"], strict=True)]
        for number, (mine, group) in enumerate(zip(self._groups, groups, strict=True)):
            if group["params"] is not mine["params"]:
                _refuse(f"'hyperparameters'[{number}]", "no parameters", "'params'")
            self._check_values(f"'hyperparameters'[{number}]", group)
        return groups, [_step(f"'steps'[{name!r}]", state["steps"][name]) for name in names]

    def _loaded(self, state_dict: object) -> tuple[list[dict[str, Any]], States]:
        whole = _mapping("the state dict", state_dict)
        _need("the state dict", whole, ("state", "param_groups"))
        given = _sequence("'param_groups'", whole["param_groups"])
        if len(given) != len(self._groups):
            _refuse("'param_groups'", f"{len(self._groups)} groups", f"{len(given)}")
        groups, owners = [], {}
        for number, (mine, theirs) in enumerate(zip(self._groups, given, strict=True)):
            group, ids = self._group(f"'param_groups'[{number}]", mine, theirs)
            for key, parameter in zip(ids, mine["params"], strict=True):
                if key in owners:
                    _refuse(f"'param_groups'[{number}]['params']", "each id once", f"{_short(key)} twice")
                owners[key] = self._segments[parameter]
            groups.append(group)
        states = _mapping("'state'", whole["state"])
        for key in states:
            if key not in owners:
                _refuse("'state'", "ids that a param group names", f"{_short(key)}")
        return groups, {owner: self._state(key, states, owner) for key, owner in owners.items()}

    def _group(self, where: str, mine: dict[str, Any], theirs: object) -> tuple[dict[str, Any], Sequence[Hashable]]:
        group = dict(_mapping(where, theirs))
        _need(where, group, ("params",))
        ids = _sequence(f"{where}['params']", group["params"])
        if len(ids) != len(mine["params"]):
            _refuse(f"{where}['params']", f"{len(mine['params'])} parameters", f"{len(ids)}")
        for key in ids:
            if not isinstance(key, Hashable) or isinstance(key, torch.Tensor):
                _refuse(f"{where}['params']", "ids", _short(key))
        del group["params"]
        known = {*self._defaults, *mine, *_TORCH_KEYS}
        for name in group:
            if name not in known:
                close = difflib.get_close_matches(str(name), sorted(known), 1)
                hint = f", did it mean {close[0]!r}" if close else ""
                _refuse(where, "hyperparameters that this optimizer has", f"{_short(name)}{hint}")
        for name in (name for name, value in self._defaults.items() if isinstance(value, bool)):
            group.setdefault(name, False)  # older versions of torch lack some
        self._check_values(where, group)
        group = {name: copy.deepcopy(value) for name, value in group.items()}
        group["params"] = mine["params"]
        if "param_names" in mine:
            group.setdefault("param_names", mine["param_names"])
        return group, ids

    def _check_values(self, where: str, group: dict[str, Any]) -> None:
        """Refuse ``group`` unless it has all hyperparameters, with values that the rule can use."""
        _need(where, group, self._defaults)
        for name, expected, got in misfits(self._rule, group):
            _refuse(f"{where}[{name!r}]", expected, got)
        self._rule.freeze(group)

    def _state(self, key: Hashable, states: Mapping[Any, Any], owner: Segment) -> Mapping[str, Any] | None:
        """Return the state of ``owner``; None where torch keeps none, before the first update."""
        where = f"'state'[{_short(key)}], parameter {owner.name}"
        if key not in states:
            return None
        state = _mapping(where, states[key])
        names = [moment.name for moment in self._rule.moments]
        for name, value in state.items():
            if name not in (*names, "step", "master") and value is not None:
                known = ", ".join(map(repr, ("step", *names)))
                _refuse(where, f"{known} and, for bf16 parameters, 'master'", _short(name))
        given = {name: value for name, value in state.items() if value is not None}
        if not given:
            return None
        if "step" in given:
            _step(f"{where}: 'step'", given["step"])
        if self._rule.name == "SGD" and "step" in given:  # it may have had no momentum so far
            names = [name for name in names if name in given]
        _need(where, given, names if "step" in given or self._rule.name != "AdamW" else (*names, "step"))
        for moment in (moment for moment in self._rule.moments if moment.name in names):
            _check_tensor(f"{where}: {moment.name!r}", given[moment.name], owner)
            if moment.is_positive and bool((given[moment.name] < 0).any()):
                _refuse(f"{where}: {moment.name!r}", "no element below zero", "some")
        if "master" in given:
            _check_tensor(f"{where}: 'master'", given["master"], owner)
        return given


def _step(where: str, value: object) -> int:
    number = _item(value)
    if not _is_real(number) or not (0 <= number <= _LARGEST_STEP and number == int(number)):
        _refuse(where, "a whole number >= 0", _short(value))
    return int(number)


def _check_tensor(where: str, value: object, owner: Segment) -> None:
    if not isinstance(value, torch.Tensor) or not _is_plain(value) or value.dtype not in _DTYPES:
        _refuse(where, "a dense tensor of floats", _short(value))
    if value.shape != owner.shape:
        _refuse(where, f"the parameter's shape {owner.shape}", f"{tuple(value.shape)}")


def _mapping(where: str, value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else _refuse(where, "a dict", _short(value))


def _sequence(where: str, value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else _refuse(where, "a list", _short(value))


def _need(where: str, found: Mapping[Any, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in found]
    if missing:
        _refuse(where, f"{', '.join(map(repr, missing))}", f"only {_short(list(found))}")


def _refuse(where: str, expected: str, got: str) -> NoReturn:
    raise _MisfitError(f"{where}: expected {expected}, got {got}")


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


# -- committed state ---------------------------------------------------------------------------------------------------


def layout_of(committed: Mapping[str, Any], segments: Iterable[Segment]) -> tuple[int, str, list[Collection[Segment]]]:
    """Return a committed optimizer's elements in a bucket, its place of updates, and the ``segments`` with state.

    The place is "cpu" or "device". First come the segments that had state from the start, then each group that got
    state together later.
    """
    numel, word = operator.index(committed["bucket_numel"]), committed.get("update_on", "cpu")  # older commits lack it
    if numel <= 0 or numel % CUT_NUMEL or word not in ("cpu", "device"):
        raise ValueError(f"buckets of {numel} elements, updates on {word!r}")
    by_name = {segment.name: segment for segment in segments}
    names = [list(names) for names in committed["managed"]]
    if len({name for each in names for name in each}) != sum(map(len, names)):
        raise ValueError("a parameter with two states")
    return numel, word, [[by_name[name] for name in each if name in by_name] for each in names]


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


# -- state access -----------------------------------------------------------------------------------------------------


class StateInStore(MutableMapping[torch.Tensor, dict[str, Any]]):
    """``optimizer.state``: the parameters that have state. The values lie in the store and are refused by name."""

    def __init__(self, optimizer: StateAccess) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self._optimizer.parameters_with_state()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return any(parameter is key for parameter in self)

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            f"{self._optimizer.title}.state: the values lie in a store, and nothing done to copies would reach them;"
            " expected optimizer.reset_state(parameters) to begin anew, optimizer.state_dict() to read, and"
            " optimizer.load_state_dict() to replace"
        )

    __getitem__ = __setitem__ = __delitem__ = clear = _refuse

    def __repr__(self) -> str:
        return f"StateInStore({len(self)} parameters)"


class StateAccess(Optimizer):
    """The part of an optimizer that reads, loads and resets the state of its parameters."""

    rule: Rule
    _segments: dict[torch.Tensor, Segment]
    _engine: Engine | None
    _state: OptimizerState
    _is_behind: bool

    @abstractmethod
    def _add_state(self, unit: StateUnit, segments: Sequence[Segment]) -> None:
        """Make the state of ``segments``, which are ``unit``'s."""

    @property
    def title(self) -> str:
        """The optimizer's name in messages."""
        return f"tiered.{self.rule.name}"

    @property
    def state(self) -> Any:
        """The parameters that have state; a use of the values raises UsageError that names the way."""
        return StateInStore(self)

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "_state"):  # torch's constructor assigns an empty one
            self.state._refuse()

    def parameters_with_state(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that a ``state_dict`` has state of."""
        return (p for p in self._parameters() if self._state.is_worth_keeping(self._segments[p]))

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def reset_state(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Begin anew: the moments and step counts of ``parameters``, or of all, become zero; values and masters stay.

        Ends pending updates first; streams the buckets. Raises UsageError, with nothing changed, between backward and
        step, before ``store.resume()``, and for a parameter of another optimizer.
        """
        self.check_idle("optimizer.reset_state()")
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        segments = []
        for number, parameter in enumerate(self._parameters() if given is None else given):
            segment = self._segments.get(parameter) if isinstance(parameter, torch.Tensor) else None
            if segment is None:
                raise UsageError(
                    f"{self.title}.reset_state: item {number} of parameters is none of this optimizer's; nothing was"
                    " changed; expected parameters that the optimizer was given"
                )
            segments.append(segment)
        with torch.no_grad():
            for segment in segments:
                self._state.reset(segment)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's own has it, plus ``master`` for bf16 parameters; the caller's own.

        Its groups say ``fused=True``, so that an optimizer of torch that loads it goes on with the same bits. Streams
        the buckets. A large one lies in a file, so that whatever saves it streams, too. Raises UsageError between
        backward and step, CapacityError where neither the store's drives nor memory have room.
        """
        self.check_idle("optimizer.state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        groups = self.groups_for(itertools.count())
        segments = {number: self._segments[parameter] for number, parameter in enumerate(self._parameters())}
        result: dict[str, Any] = {"state": self._state.gather_all(segments), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            result = result if (replaced := after(self, result)) is None else replaced
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dict that ``state_dict`` (this one's, or torch's own) returned. Streams the buckets.

        Raises UsageError, with nothing changed, between backward and step, for another kind of dict, and for one that
        does not fit: other groups, shapes, names or values; masters that do not round to the present parameters.
        """
        self.check_idle("optimizer.load_state_dict()")
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict if (replaced := hook(self, state_dict)) is None else replaced
        with torch.no_grad():
            with without_dispatch():
                groups, states = self.reader().loaded(state_dict)
            for segment, state in states.items():  # order: all that may refuse first
                self._state.check_master(segment, state)
            for segment in [s for s, state in states.items() if state and s not in self._state.steps]:
                self._add_state(segment.unit, [segment])
            self.param_groups = groups
            for segment, state in states.items():
                if segment in self._state.steps:
                    self._state.scatter(segment, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @property
    def kept(self) -> OptimizerState:
        """The state as it lies in the store."""
        return self._state

    def segment_of(self, parameter: torch.Tensor) -> Segment:
        """Return the segment of one of this optimizer's parameters."""
        return self._segments[parameter]

    def groups_for(self, ids: Iterable[Hashable]) -> list[dict[str, Any]]:
        """Return the groups as torch's optimizer has them, with ``ids`` in the place of parameters."""
        options, each = _TORCH_OPTIONS.get(self.rule.name, {}), iter(ids)
        return [group | options | {"params": [next(each) for _ in group["params"]]} for group in self.param_groups]

    def reader(self, title: str = "") -> StateReader:
        """Return the reader of states from outside; its errors are in the name of ``title``, or of load_state_dict."""
        found: dict[str, Any] = {"groups": self.param_groups, "defaults": self.defaults, "segments": self._segments}
        return StateReader(title or f"{self.title}.load_state_dict", self.rule, **found)

    def load_pieces(
        self,
        groups: list[dict[str, Any]],
        states: Iterable[tuple[Segment, int, Mapping[str, Callable[[slice], torch.Tensor]]]],
    ) -> None:
        """Take ``groups`` of the reader's, and replace states; see ``OptimizerState.write``."""
        self.param_groups = groups
        for segment, steps, values in states:
            if segment not in self._state.steps:
                self._add_state(segment.unit, [segment])
            self._state.write(segment, steps, values)

    def check_idle(self, what: str) -> None:
        """Finish the pending updates; raise UsageError unless no forward, backward or step is under way."""
        if self._engine is not None:
            self._engine.check_idle(what)
        if self._is_behind:
            raise UsageError(f"{what}: the store holds the state of {self.title}; expected store.resume() first")
