"""Activations: the tensors that autograd saves in each unit's forward are kept, recomputed, or swapped.

The words of ``shard(activations=...)`` and the rule of "auto" are here, and torch's non-reentrant checkpoint around a
unit's forward, which promises what torch's promises; swapped_activations.py does the rest.
"""

from __future__ import annotations

import collections
import difflib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered.bytes.interrupt import outside
from tiered.errors import UsageError
from tiered.units import format_bytes
from tiered.zero.activations.swapped_activations import FreedObjects, SwappedActivations, SwappedTensor
from tiered.zero.parameters.module_calls import EngineParts
from tiered.zero.parameters.saved_references import Kept, our_pair_in_force, with_repeated_arguments
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import in_graph_task

__all__ = ["ActivationRule", "Activations", "choose_swapped", "words_of"]


WORDS = ("auto", "keep", "recompute", "swap")

ActivationRule = str | Mapping[str, str] | Callable[[str, nn.Module], str]

_log = logging.getLogger("tiered")


def choose_swapped(saved: Mapping[str, int], most_kept_bytes: int) -> set[str]:
    """Return the units that swap their saved tensors, so that those of the others take at most ``most_kept_bytes``.

    ``saved``: bytes by unit, in the order of use. The first units swap: a backward needs their bytes last.
    """
    excess = sum(saved.values()) - most_kept_bytes
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

    With "auto" a unit keeps as long as all kept tensors fit into ``most_kept_bytes`` of ordinary memory. The first
    forward with gradients measures the bytes that each unit saves, and ``choose_swapped`` decides from then on; tensors
    beyond these bytes even so are swapped as they come. A unit that runs under autocast recomputes: its saved casts
    are as large as its weights.
    """

    def __init__(self, engine: EngineParts) -> None:
        self.swapped = SwappedActivations(engine)
        self.words: dict[Unit, str] = {}  # those missing keep
        self.swapping: set[Unit] | None = None  # the "auto" units that swap, once measured
        self.most_kept_bytes: int | None = None  # that "auto" may keep; measured before the first forward
        self._engine = engine
        self._kept: dict[int, weakref.ref[_KeptStorage]] = {}  # by the address of torch's StorageImpl
        self._kept_bytes = 0
        self._freed: FreedObjects[tuple[int, int]] = FreedObjects()  # address and bytes of storages not kept any more
        self._saved: collections.Counter[Unit] = collections.Counter()  # bytes, in the forward that is measured
        self._has_measured = False
        self._has_warned = False

    def set_words(self, words: Mapping[str, str], share_bytes: int) -> None:
        """Treat each unit by its word; swapped tensors have ``share_bytes`` of DRAM."""
        self.words = {unit: words[unit.name] for unit in self._engine.units}
        self.swapped.share_bytes = share_bytes

    # -- forwards ------------------------------------------------------------------------------------------------

    def may_recompute(self, unit: Unit) -> bool:
        """Return whether the forward of ``unit`` may have to run again in backward."""
        return self.words.get(unit) in ("auto", "recompute")

    def wrap(self, unit: Unit, module: nn.Module) -> None:
        """Put the forward of ``module``, which is ``unit``'s, under its word."""
        forward, calls = module.forward, self._engine.calls

        def again(names: tuple[str, ...], *values: Any) -> Any:
            """Run the forward, in checkpoint, which runs it once more in backward."""
            num = len(values) - len(names)
            args, kwargs = values[:num], dict(zip(names, values[num:], strict=True))
            if in_graph_task():
                args, kwargs = with_repeated_arguments(args, kwargs)
            with calls.running(module, unit):  # puts a pair of ours above checkpoint's
                return outside(forward, *args, **kwargs)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._recomputes(unit):
                return outside(forward, *args, **kwargs)
            values = (*args, *kwargs.values())  # checkpoint has autograd keep no keyword argument
            return outside(checkpoint, functools.partial(again, tuple(kwargs)), *values, use_reentrant=False)

        module.forward = run

    def _recomputes(self, unit: Unit) -> bool:
        """Return whether a forward of ``unit`` that begins now is to run again in backward."""
        word = self.words.get(unit, "keep")
        if word != "recompute" and not (word == "auto" and torch.is_autocast_enabled(unit.tier.device.type)):
            return False
        if not torch.is_grad_enabled() or in_graph_task():
            return False
        pair = our_pair_in_force()
        return pair is not None and pair.may_recompute  # inside a unit that recomputes, the outer one does

    def begin_forward(self, *, is_first: bool) -> None:
        """An outermost forward begins; ``is_first`` of its step."""
        if self.most_kept_bytes is None and "auto" in self.words.values():
            self.most_kept_bytes = max(0, self._engine.tier.free_nbytes()) // 2
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
        if not self._has_measured or self.swapping is not None or self.most_kept_bytes is None:
            return
        root, *others = self._engine.units
        units = [unit for unit in (*others, root) if self.words.get(unit) == "auto"]  # the root ends the forward
        names = choose_swapped({unit.name: self._saved[unit] for unit in units}, self.most_kept_bytes)
        self.swapping = {unit for unit in units if unit.name in names}
        if self.swapping:
            _log.info(
                'activations="auto": a forward saves %s, %s may stay in memory: of %d units %d swap',
                format_bytes(self._saved.total()),
                format_bytes(self.most_kept_bytes),
                len(units),
                len(self.swapping),
            )

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
            return self._keep_or_swap(unit, tensor)
        if not self._has_warned and torch.is_autocast_enabled(unit.tier.device.type) and word != "recompute":
            self._warn_of_casts(unit)
        swapped = self.swapped.pack(tensor) if word == "swap" else None
        return Kept(tensor) if swapped is None else swapped

    def _keep_or_swap(self, unit: Unit, tensor: torch.Tensor) -> Kept | SwappedTensor:
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
            if unit in (self.swapping or ()) or self._kept_bytes + nbytes > (self.most_kept_bytes or 0):
                swapped = self.swapped.pack(tensor)
                if swapped is not None:
                    return swapped
            counted = _KeptStorage()
            self._kept[address] = weakref.ref(counted)
            self._kept_bytes += nbytes
            self._freed.watch(counted, (address, nbytes))
        return Kept(tensor, counted)

    def _forget_ended(self) -> None:
        """Take the storages that are not kept any more out of the count."""
        while (ended := self._freed.next_freed()) is not None:
            address, nbytes = ended
            self._kept_bytes -= nbytes
            reference = self._kept.get(address)
            if reference is not None and reference() is None:
                del self._kept[address]


class _KeptStorage:
    """A token that lives as long as a tensor on one storage is kept."""

    __slots__ = ("__weakref__",)
