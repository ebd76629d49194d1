"""StateAccess: the ways that an optimizer offers to its state, which lies in a store: read, load and reset.

The store's own way, at commits and resumes, is in loaded_state.py.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import UsageError
from tiered.zero.optimizer.loaded_state import StateDictReader
from tiered.zero.parameters.parameter import without_dispatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiered.zero.engine import Engine
    from tiered.zero.formats.rules import Rule
    from tiered.zero.optimizer.optimizer_state import OptimizerState, StateUnit
    from tiered.zero.parameters.unit import Segment

__all__ = ["StateAccess"]


_TORCH_OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": True,
              "decoupled_weight_decay": True},
    "SGD": {"foreach": None, "differentiable": False, "fused": True},
}  # fmt: skip
"""Options of torch's own that a state dict has: torch replaces the target's by them, and the bits are fused ones."""


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
    _engines: list[Engine]
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
        self._check_idle("optimizer.reset_state()")
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
        with INTERRUPTS, torch.no_grad():
            for segment in segments:
                self._state.reset(segment)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's own has it, plus ``master`` for bf16 parameters; the caller's own.

        Its groups say ``fused=True``, so that an optimizer of torch that loads it goes on with the same bits. Streams
        the buckets. A large one lies in a file, so that whatever saves it streams, too. Raises UsageError between
        backward and step, CapacityError where neither the store's drives nor memory have room.
        """
        self._check_idle("optimizer.state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        numbers = itertools.count()
        options = _TORCH_OPTIONS.get(self.rule.name, {})
        groups = [group | options | {"params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
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
        self._check_idle("optimizer.load_state_dict()")
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict if (replaced := hook(self, state_dict)) is None else replaced
        with INTERRUPTS, torch.no_grad():
            with without_dispatch():
                loaded = self._reader().read(state_dict)
            for segment, state in loaded.states.items():  # order: all that may refuse first
                self._state.check_master(segment, state)
            for segment in [s for s, state in loaded.states.items() if state and s not in self._state.steps]:
                self._add_state(segment.unit, [segment])
            states = {segment: state for segment, state in loaded.states.items() if segment in self._state.steps}
            self.param_groups = loaded.groups
            for segment, state in states.items():
                self._state.scatter(segment, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _reader(self) -> StateDictReader:
        return StateDictReader(
            self.title, self.rule, groups=self.param_groups, defaults=self.defaults, segments=self._segments
        )

    def _check_idle(self, what: str) -> None:
        for engine in self._engines:
            engine.check_idle(what)
        if self._is_behind:
            raise UsageError(f"{what}: the store holds the state of {self.title}; expected store.resume() first")
