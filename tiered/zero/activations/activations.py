"""Activations: the tensors that autograd saves in each unit's forward are kept, recomputed, or swapped.

The words of ``shard(activations=...)`` and the rule of "auto" are here, and torch's non-reentrant checkpoint around a
unit's forward, which promises what torch's promises; swapped.py does the rest. Forward is one forward, as the units see
it: module hooks and wrapped methods report to it. The calls themselves are listed in calls.py; backward.py is the other
half of a step.
"""

from __future__ import annotations

import collections
import difflib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered.bytes.interrupt import INTERRUPTS, outside, uninterrupted
from tiered.errors import UsageError
from tiered.store.waiting.recorder import Begun
from tiered.units import format_bytes
from tiered.zero.activations.saved import Kept, is_recomputing, own_pair_in_force, with_repeated_arguments
from tiered.zero.activations.swapped import FreedObjects, SwappedActivations, SwappedTensor
from tiered.zero.gradients.backward import Backward
from tiered.zero.one_rank import refuse_distributed
from tiered.zero.parameters.access import check_forward
from tiered.zero.parameters.conductor import Conductor
from tiered.zero.parameters.methods import any_requires_grad, own, running
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import Event, graph_task, in_graph_task

__all__ = ["ActivationRule", "Activations", "Forward", "choose_swapped", "recomputed", "words_of"]


def recomputed(conductor: Conductor, unit: Unit, module: nn.Module) -> Callable[..., Any]:
    """Return a forward of ``module``, which is ``unit``'s, that keeps its arguments and runs again in backward."""
    forward = module.forward

    def run(names: tuple[str, ...], *values: Any) -> Any:
        num = len(values) - len(names)
        args, kwargs = values[:num], dict(zip(names, values[num:], strict=True))
        if in_graph_task():
            args, kwargs = with_repeated_arguments(args, kwargs)
        with running(conductor, module, unit):  # puts a pair of ours above checkpoint's
            return outside(forward, *args, **kwargs)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())  # checkpoint has autograd keep no keyword argument
        return outside(checkpoint, functools.partial(run, tuple(kwargs)), *values, use_reentrant=False)

    return checkpointed


# -- activations -------------------------------------------------------------------------------------------------------


WORDS = ("auto", "keep", "recompute", "swap")

ActivationRule = str | Mapping[str, str] | Callable[[str, nn.Module], str]

_log = logging.getLogger("tiered")


def choose_swapped(saved: Mapping[str, int], room_bytes: int) -> set[str]:
    """Return the units that swap their saved tensors, so that those of the others fit ``room_bytes``.

    ``saved``: bytes by unit, in the order of use. The first units swap: a backward needs their bytes last.
    """
    excess = sum(saved.values()) - room_bytes
    swapped = set()
    for name, nbytes in saved.items():
        if excess > 0 and nbytes:
            swapped.add(name)
            excess -= nbytes
    return swapped


def words_of(rule: ActivationRule, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the word for each of ``modules``, by unit name, the root unit's as "root".

    ``rule``: a word for all, a mapping from unit names (those that it leaves out are "auto"), or a function
    (name, module) -> word. Raises TypeError for other rules, UsageError for other words, for names that are no
    unit's, and for a root unit that is asked for by name to recompute: that would be the whole forward.
    """
    if isinstance(rule, str):
        words = dict.fromkeys(modules, rule)
        if rule == "recompute":
            words["root"] = "keep"
    elif isinstance(rule, Mapping):
        for name in rule:
            if name not in modules:
                close = difflib.get_close_matches(name, list(modules), n=1)
                raise UsageError(
                    f"activations= names {name!r}, which is no unit{f' (is it {close[0]}?)' if close else ''}; the"
                    f" units are {', '.join(list(modules)[:8])}{', ...' if len(modules) > 8 else ''}"
                )
        words = {name: rule.get(name, "auto") for name in modules}
    elif callable(rule):
        words = {name: rule(name, module) for name, module in modules.items()}
    else:
        raise TypeError(
            f"activations={rule!r}; expected a word of {WORDS}, a mapping from unit names, or a function (name, module)"
        )
    for name, word in words.items():
        if word not in WORDS:
            raise UsageError(f"activations={word!r} for unit {name!r}; expected one of {', '.join(map(repr, WORDS))}")
    if words["root"] == "recompute":
        raise UsageError(
            "activations='recompute' for the root unit, whose forward is that of the whole model; expected 'keep',"
            " 'swap' or 'auto' for 'root'"
        )
    return words


class Activations:
    """The tensors that autograd saves in the forwards of one model.

    With "auto" a unit keeps as long as all kept tensors fit into ``room_bytes`` of ordinary memory. The first forward
    with gradients measures the bytes that each unit saves, and ``choose_swapped`` decides from then on; tensors that
    would exceed the room even so are swapped as they come. A unit that runs under autocast recomputes: its saved casts
    are as large as its weights.
    """

    def __init__(self, engine: Conductor) -> None:
        self.swapped = SwappedActivations(engine)
        self.words: dict[Unit, str] = {}  # those missing keep
        self.swapping: set[Unit] | None = None  # the "auto" units that swap, once measured
        self.room_bytes: int | None = None  # that "auto" may keep; measured before the first forward
        self._engine = engine
        self._kept: dict[int, weakref.ref[_KeptStorage]] = {}  # by the address of torch's StorageImpl
        self._kept_bytes = 0
        self._freed: FreedObjects[tuple[int, int]] = FreedObjects()  # address and bytes of storages not kept any more
        self._saved: collections.Counter[Unit] = collections.Counter()  # bytes, in the forward that is measured
        self._has_measured = False
        self._has_warned = False

    def take(self, words: Mapping[str, str], share_bytes: int) -> None:
        """Treat each unit by its word; swapped tensors have ``share_bytes`` of DRAM."""
        self.words = {unit: words[unit.name] for unit in self._engine.units}
        self.swapped.share_bytes = share_bytes

    # -- forwards ------------------------------------------------------------------------------------------------

    def may_recompute(self, unit: Unit) -> bool:
        """Return whether the forward of ``unit`` may have to run again in backward."""
        return self.words.get(unit) in ("auto", "recompute")

    def wrap(self, unit: Unit, module: nn.Module) -> None:
        """Put the forward of ``module``, which is ``unit``'s, under its word."""
        forward, twice = module.forward, recomputed(self._engine, unit, module)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (twice if self._recomputes(unit) else forward)(*args, **kwargs)

        module.forward = run

    def _recomputes(self, unit: Unit) -> bool:
        """Return whether a forward of ``unit`` that begins now is to run again in backward."""
        word = self.words.get(unit, "keep")
        if word != "recompute" and not (word == "auto" and torch.is_autocast_enabled(unit.tier.device.type)):
            return False
        if not torch.is_grad_enabled() or in_graph_task():
            return False
        pair = own_pair_in_force()
        return pair is not None and pair.may_recompute  # inside a unit that recomputes, the outer one does

    def begin_forward(self, *, is_first: bool) -> None:
        """An outermost forward begins; ``is_first`` of its step."""
        if self.room_bytes is None and "auto" in self.words.values():
            self.room_bytes = max(0, self._engine.tier.free_nbytes()) // 2
        if is_first:
            self.swapped.begin_step()
        else:
            self.swapped.sweep()

    def end_forward(self, *, may_go_on: bool) -> None:
        """An outermost forward with gradients has ended: the first one decides which units "auto" swaps.

        ``may_go_on``: the forward is one of several in a method. They decide together, when the method or their
        backward ends.
        """
        self._has_measured = True
        if not may_go_on:
            self.decide()

    def decide(self) -> None:
        """Decide which units "auto" swaps, once a forward was measured. Idempotent."""
        if not self._has_measured or self.swapping is not None or self.room_bytes is None:
            return
        root, *others = self._engine.units
        units = [unit for unit in (*others, root) if self.words.get(unit) == "auto"]  # the root ends the forward
        names = choose_swapped({unit.name: self._saved[unit] for unit in units}, self.room_bytes)
        self.swapping = {unit for unit in units if unit.name in names}
        if self.swapping:
            _log.info(
                'activations="auto": a forward saves %s, %s may stay in memory: of %d units %d swap',
                format_bytes(self._saved.total()),
                format_bytes(self.room_bytes),
                len(units),
                len(self.swapping),
            )

    def reset(self) -> None:
        """The step was dropped: its swapped tensors are gone."""
        self.swapped.reset()

    def _warn_of_casts(self, unit: Unit) -> None:
        if unit is self._engine.units[0]:
            return  # saved tensors of the root unit can only be kept or swapped
        self._has_warned = True
        nbytes = sum(2 * segment.numel for unit in self._engine.units for segment in unit.segments)
        _log.warning(
            "a forward under autocast without recompute: the casts of weights that autograd saves take up to %s beyond"
            ' the DRAM budget until backward; activations="auto" or "recompute" avoids them, and so does'
            " param_dtype=torch.bfloat16 without autocast",
            format_bytes(nbytes),
        )

    # -- saved tensors -------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Kept | SwappedTensor:
        """Return the object that autograd is to hold for ``tensor``, which is no part of a unit."""
        unit = self._engine.calls.innermost_unit() or self._engine.units[0]
        word = self.words.get(unit, "keep")
        if word == "auto":
            return self._pack_within_room(unit, tensor)
        if not self._has_warned and torch.is_autocast_enabled(unit.tier.device.type) and word != "recompute":
            self._warn_of_casts(unit)
        swapped = self.swapped.pack(tensor) if word == "swap" else None
        return Kept(tensor) if swapped is None else swapped

    def _pack_within_room(self, unit: Unit, tensor: torch.Tensor) -> Kept | SwappedTensor:
        if self._freed:
            self._forget_ended()
        if tensor.layout is not torch.strided:
            return Kept(tensor)
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        reference = self._kept.get(address)
        counted = None if reference is None else reference()
        if counted is None:
            if self.swapping is None:
                self._saved[unit] += nbytes
            if unit in (self.swapping or ()) or self._kept_bytes + nbytes > (self.room_bytes or 0):
                swapped = self.swapped.pack(tensor)
                if swapped is not None:
                    return swapped
            counted = _KeptStorage()
            with INTERRUPTS:
                self._kept[address] = weakref.ref(counted)
                self._kept_bytes += nbytes
                self._freed.watch(counted, (address, nbytes))
        return Kept(tensor, counted)

    def _forget_ended(self) -> None:
        """Take the storages that are not kept any more out of the count."""
        with INTERRUPTS:
            while (ended := self._freed.next_freed()) is not None:
                address, nbytes = ended
                self._kept_bytes -= nbytes
                reference = self._kept.get(address)
                if reference is not None and reference() is None:
                    del self._kept[address]


class _KeptStorage:
    """A token that lives as long as a tensor on one storage is kept."""

    __slots__ = ("__weakref__",)


# -- forward -----------------------------------------------------------------------------------------------------------


class Forward:
    """The module calls of one model. Units are shown where their call begins, and parked where it ends."""

    def __init__(
        self, conductor: Conductor, backward: Backward, activations: Activations, begin: Callable[[bool], None]
    ) -> None:
        """``begin(is_first)`` is called as an outermost forward begins, the first one of a step or not."""
        self._conductor = conductor
        self._phase = conductor.phase
        self._calls = conductor.calls
        self._open_units = conductor.open_units
        self._backward = backward
        self._activations = activations
        self._begin = begin
        self._begun: Begun | None = None  # the outermost call that runs, where it is no recomputation

    @uninterrupted
    def begin_call(self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of ``module``, whose ``unit`` it is if it is one's; return the arguments to call it with.

        None for those that it was called with.
        """
        with self._conductor.working_set.mark:
            if self._calls and module is self._conductor.model():
                self.leave_abandoned(module)
            changed = with_repeated_arguments(args, kwargs) if graph_task() != -1 and is_recomputing() else None
            self.enter(module, unit)
            return changed

    @uninterrupted
    def end_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward of ``module``, also one that failed.

        Return the output to hand on, with nothing of it in a unit's buffer.
        """
        with self._conductor.working_set.mark:
            if output is None and (error := sys.exc_info()[1]) is not None:
                self._conductor.tier.note_dials(error, f"the forward of {type(module).__name__}")
            for call in self._calls.end(module):
                self.leave(call.unit)
            if self._calls.are_in_forward:
                return output
            if self._begun is not None:
                self._conductor.working_set.recorder.worked("forward", type(module).__name__, self._begun)
                self._begun = None
            if torch.is_grad_enabled() and not in_graph_task() and any_requires_grad(output):
                self.ended()
            return own(output, self._open_units.address_of)

    def enter(self, module: nn.Module, unit: Unit | None) -> None:
        """A module call begins."""
        if not self._calls.are_in_forward:
            self._begun = None if in_graph_task() else self._conductor.working_set.recorder.begin()
        call = self._calls.begin(module, unit)
        if len(self._calls) == 1:
            self.enter_outermost(module)
        self._calls.enter_pair(call)
        if unit is not None:
            unit.show()

    def enter_outermost(self, module: nn.Module) -> None:
        """The outermost call begins, of ``module``. Raises UsageError where none may, and changes nothing then."""
        name = type(module).__name__
        check_forward(self._conductor, name)
        if in_graph_task():
            self._backward.seen()
            return
        self._backward.settle()
        phase = self._phase
        if phase.updates_in_backward and torch.is_grad_enabled():
            refuse_distributed(None)
        phase.check(Event.FORWARD if torch.is_grad_enabled() else Event.EVALUATION, f"forward of {name}")
        goes_on = self._calls.goes_on_with(module)
        is_first = not (goes_on or phase.is_between or phase.has_updated or phase.has_gradients())
        self._activations.begin_forward(is_first=is_first)
        self._begin(is_first)

    def leave(self, unit: Unit | None) -> None:
        """A call of the module of ``unit``, if it is one's, is over: park it unless it is used on."""
        if unit is None or self._phase.abandoned or unit in self._open_units.shielded or unit in self._calls.units():
            return
        if not self.keeps_open() or unit.was_written():
            unit.park()

    def keeps_open(self) -> bool:
        """Return whether units stay open until their backward: all keys are in DRAM for good, where they are used.

        Not in a method that runs outside of any forward: its recomputation finds its units parked, as it did.
        """
        conductor = self._conductor
        if not (conductor.schedule.is_settled and conductor.tier.computes_in_dram) or self._calls.methods:
            return False
        return torch.is_grad_enabled() and not in_graph_task()

    def leave_abandoned(self, beginning: nn.Module | None = None) -> None:
        """Leave calls that an interrupt has ended and no hook has seen; a call of ``beginning`` begins now."""
        if not in_graph_task():
            self._calls.leave_abandoned(self.leave, beginning)

    def leave_methods(self) -> None:
        """An event between steps comes: methods that are calls, with no forward inside, stop being calls."""
        self._calls.leave_methods(self.leave)

    def ended(self) -> None:
        """An outermost forward with gradients has ended."""
        self._phase.is_between = True
        self._activations.end_forward(may_go_on=bool(self._calls.methods))

    def method_ended(self) -> None:
        """The outermost method has ended."""
        self._activations.decide()
