"""StreamingOptimizer: a ``torch.optim.Optimizer`` whose state lives in a store, for sharded parameters and plain ones.

AdamW, SGD and Lion, which users make, are thin classes over it. rules.py has the arithmetic, codec.py lays the state
out, bucket_update.py streams it. accelerate wraps optimizers in one of its own, which copies their whole state to a
device and back, and lets no step and no ``zero_grad`` through while it accumulates gradients. Here the state stays, and
that rule is kept: accelerate's ``prepare()`` leaves the optimizer as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tiered.bytes.interrupt import outside
from tiered.errors import UsageError
from tiered.ranks.ranks import Ranks
from tiered.store.format.state_text import encode
from tiered.store.generations.registry import taking_apart
from tiered.store.store import Store
from tiered.tiers.compute_tier import ComputeTier
from tiered.zero.engine import Engine
from tiered.zero.formats.codec import Source
from tiered.zero.formats.rules import AdamWRule, LionRule, Rule, SGDRule
from tiered.zero.formats.state_layout import FORMATS, Layouts
from tiered.zero.gradients.stand_in import SharedGradient
from tiered.zero.layout import bucket_numel_for, tile_numel_for, whole_pages
from tiered.zero.model_state import check_added
from tiered.zero.one_rank import refuse_distributed
from tiered.zero.optimizer.background_updates import UpdateThread
from tiered.zero.optimizer.bucket_update import UnitUpdate, UpdatePipeline, choose_place, give_place
from tiered.zero.optimizer.fp32_masters import taken_over
from tiered.zero.optimizer.optimizer_state import OptimizerState, PlainUnit, StateUnit
from tiered.zero.optimizer.state_dicts import (
    StateAccess,
    compare,
    given_of,
    layout_of,
    misfits,
    options_of,
    warn_of_dropped,
    withhold_steps,
)
from tiered.zero.parameters.parameter import TieredParameter, without_dispatch
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["SGD", "AccelerateGate", "AdamW", "Lion", "StreamingOptimizer"]


class AccelerateGate:
    """An optimizer that counts as prepared by accelerate; accelerate is never imported here."""

    step_was_skipped = False  # accelerate asks after each step
    _store: Store
    _gradient_state: Any = None  # accelerate's, once its prepare() has seen this optimizer

    @property
    def optimizer(self) -> Any:
        """The optimizer within, which accelerate looks for to find its scheduler: this one."""
        return self

    @property
    def _is_accelerate_prepared(self) -> bool:
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Take note: accelerate's prepare() sets this. Raises UsageError for fp16, and for unknown ranks."""
        state: Any = sys.modules["accelerate.state"]
        accelerated, ranks = state.AcceleratorState(), self._store.ranks
        if ranks is not None and accelerated.num_processes == 1:
            raise UsageError(
                f"this process is the only one to accelerate, and rank {ranks.rank} of {ranks.world} to"
                f" {self._store!r}: accelerator.prepare(loader) would give each rank all batches; expected the script"
                " to be started by torchrun or accelerate launch, and Accelerator(cpu=True) on a machine without"
                " accelerators, or tiered.Store(..., process_group=False) for a run of this process alone"
            )
        if accelerated.mixed_precision == "fp16":
            raise UsageError(
                'Accelerator(mixed_precision="fp16") steps optimizers through a scaler of its own; expected "no", and'
                " tiered.shard(param_dtype=torch.bfloat16), or tiered.GradScaler in a loop of your own"
            )
        self._gradient_state = state.GradientState()

    @property
    def is_held_back(self) -> bool:
        """Whether accelerate accumulates gradients now: ``step`` and ``zero_grad`` do nothing then."""
        return self._gradient_state is not None and not self._gradient_state.sync_gradients


# -- streaming optimizer -----------------------------------------------------------------------------------------------


_UPDATES = ("auto", "step", "backward")

_READ_AHEAD = 2
"""Buckets on their way in while one is updated: with the one being updated, the 3 buckets of the smallest budget."""


class StreamingOptimizer(AccelerateGate, StateAccess):
    """The common part of all optimizers of ``tiered``: they stream their state through a store, updated by a ``rule``.

    ``params``: parameters or groups as for any torch optimizer, sharded by ``tiered.shard`` or plain; plain ones need
    ``store``. ``defaults``: the hyperparameters of groups that do not name them. ``update="step"`` hands all
    updates over in ``step()``, to run behind the next forward; ``update="backward"`` each as soon as its gradients are
    final, and ``step()`` only concludes. "auto" is "step", which is right for every loop: an optimizer cannot know
    whether the loop will clip or accumulate. ``state`` is the word for the format that state is kept in.

    A store that already holds this optimizer's state is adopted: call ``store.resume()``. Not thread-safe. Raises
    UsageError for unknown words or a store that holds another optimizer, CapacityError where the device lacks room.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        *,
        update: str,
        state: str,
        store: Store | None,
    ) -> None:
        self.rule = rule
        for name, expected, got in misfits(rule, defaults):
            raise ValueError(f"{self.title}({name}={got}); expected {expected}")
        self._one_of("update", update, _UPDATES)
        self._one_of("state", state, FORMATS)
        self.in_backward = update == "backward"
        self.format = state
        self._segments: dict[torch.Tensor, Segment] = {}
        self._hypers: dict[Segment, dict[str, Any]] = {}
        self._engine: Engine | None = None  # of the sharded model, if any
        self._plain: PlainUnit | None = None
        self._beside: dict[str, torch.Tensor] = {}  # plain parameters outside of the sharded model, by name
        self._updates_on, self._is_attached, self._is_behind = "cpu", False, False
        self._frozen: list[dict[str, Any]] | None = None  # the hyperparameters of the step that has begun
        super().__init__(params, defaults)
        self._given = options_of(self.param_groups)  # when the run began
        self._store = self._find_store(store)
        self._attach()

    def __repr__(self) -> str:
        return f"{super().__repr__()} over {len(self._segments)} parameters in {self._store!r}"

    def _one_of(self, name: str, value: str, known: tuple[str, ...]) -> None:
        if value not in known:
            raise UsageError(f"{self.title}({name}={value!r}); expected one of {', '.join(map(repr, known))}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; one of sharded parameters also later, which the next step updates.

        A run that resumes adds the groups of its commit before ``store.resume()``; a rollback drops those that were
        added since. Raises UsageError, with nothing changed, for other parameters, and while a step updates.
        """
        with without_dispatch():
            super().add_param_group(param_group)
        if not self._is_attached:
            return
        group = self.param_groups[-1]
        added: dict[torch.Tensor, Segment] = {p: p.segment for p in group["params"] if isinstance(p, TieredParameter)}
        try:
            if self._frozen is not None:
                raise UsageError("add_param_group while a step updates; expected after optimizer.step()")
            engines = {getattr(added[p].unit, "engine", None) if p in added else None for p in group["params"]}
            if engines != {self._engine} or self._engine is None:
                raise UsageError(
                    f"add_param_group of parameters beside the sharded model; expected its own: {self.title} takes"
                    " others when it is made"
                )
            self.rule.freeze(group)
            encode(options_of([group]), name="add_param_group()")  # order: it may refuse
        except BaseException:
            self.param_groups.pop()
            raise
        self._segments |= added
        self._given += options_of([group])

    def _find_store(self, store: Store | None) -> Store:
        """Return the one store of the parameters, and note their engine."""
        engines: dict[Engine, None] = {}
        for parameter in [each for each in self._parameters() if isinstance(each, TieredParameter)]:
            engine = parameter.segment.unit.engine if isinstance(parameter.segment.unit, Unit) else None
            if not isinstance(engine, Engine):
                raise UsageError(f"{self.title} on parameters made by construct; expected tiered.shard(model) first")
            engines[engine] = None
        stores = {id(each): each for each in [*([] if store is None else [store]), *(e.store for e in engines)]}
        if not stores:
            raise UsageError(
                f"{self.title} on parameters that tiered.shard has not moved; expected store=, the store in which they"
                " and their optimizer state are kept"
            )
        if len(stores) > 1:
            raise UsageError(f"{self.title} over several stores; expected one: make one optimizer per store")
        (found,) = stores.values()
        if len(engines) > 1 or found.registered("tiered.optimizer"):
            raise UsageError(f"a second {self.title} in one store; expected one optimizer with several param groups")
        self._engine = next(iter(engines), None)
        return found

    def _attach(self) -> None:
        """Lay the state out, create it or adopt it, and register for the store's commits."""
        pairs = [zip(group["params"], group.get("param_names", ()), strict=False) for group in self.param_groups]
        named = {id(p): name for each in pairs for p, name in each}
        engine = self._engine
        if engine is not None and self.in_backward:
            refuse_distributed(engine.model())
        plain = [p for p in self._parameters() if not isinstance(p, TieredParameter)]
        if plain and self.in_backward:
            raise UsageError(
                'update="backward" on plain parameters; expected sharded ones: call tiered.shard, or update="step"'
            )
        model = self._store.registered("tiered.model")
        if plain:
            check_added(plain if model else ())
            self._plain = PlainUnit([(named.get(id(p), f"plain.{i}"), p) for i, p in enumerate(plain)])
            self._segments |= {segment.parameter: segment for segment in self._plain.segments}
            ours = {id(p) for p in model.model.parameters()} if model else ()
            self._beside = {s.name: s.parameter for s in self._plain.segments if ours and id(s.parameter) not in ours}
            self._plain.share(self._store, self.title)
        self._segments |= {p: p.segment for p in self._parameters() if isinstance(p, TieredParameter)}
        committed = self._store.registered_state("tiered.optimizer") if self._store.durable else None
        units: list[StateUnit] = [] if engine is None else [*engine.units]
        units += [self._plain] if self._plain is not None else []
        managed: list[Collection[Segment]] = [{s for p, s in self._segments.items() if p.requires_grad}]
        before = None  # the place where updates were computed
        numel = bucket_numel_for(
            [-(-sum(s.numel for s in unit.segments if s in managed[0]) // unit.world) for unit in units]
        )
        if committed is not None:
            with taking_apart("tiered.optimizer", by=self.title):
                numel, before, managed = layout_of(committed, (s for unit in units for s in unit.segments))
        # Order: of those that are trained, as the shares of the budget were cut; a larger one takes more tiles.
        tile_numel = tile_numel_for(numel, [len(s.stretch) for p, s in self._segments.items() if p.requires_grad])
        tier = ComputeTier(self._store.working_set) if engine is None else engine.tier
        self._pipeline = UpdatePipeline(self._store.working_set, tier, tile_numel)
        try:
            scratch, layouts = self._pipeline.scratch, Layouts(self.format, self.rule)
            self._state = OptimizerState(self._store, units, managed, layouts, bucket_numel=numel, scratch=scratch)
            encode(self.committed_state(), name="tiered.optimizer.state_dict()")  # order: it may refuse
            with taken_over(engine, self.title) as masters:
                if committed is None:
                    self._state.create(masters)
                else:
                    with taking_apart("tiered.optimizer", by=self.title):
                        groups = committed["groups"][: len(self.param_groups)]  # others may be added until the resume
                        compare(committed | {"groups": groups}, self._description())
                    self._state.adopt()
                if engine is not None:
                    with_group = self._pipeline, self.rule, self.param_groups[0]
                    self._updates_on = choose_place(engine, *with_group, self._state.buckets, before)
            self._check_equal()
        except BaseException:
            self._pipeline.close()
            raise
        self._is_behind = committed is not None  # the step counts of the state are still to be loaded
        self._register()
        self._is_attached = True
        if engine is not None:
            self._drive(engine)

    def _check_equal(self) -> None:
        """Over ranks: raise UsageError, on all, for an optimizer that is another on some rank."""
        if self._store.ranks is None:
            return
        lines = [f"{key} {value!r}" for key, value in self._description().items()]
        lines += [repr(options_of(self.param_groups)), f"update={self.in_backward}"]
        self._store.ranks.check_equal(self.title, lines, "the same optimizer on all ranks")

    def _register(self) -> None:
        """Have the state ride along with the store's commits, which also propose how many steps were made."""
        own = {"state_dict": self.committed_state, "load_state_dict": self.load_committed_state}
        small = SimpleNamespace(**own, num_steps=lambda: max(self._state.steps.values(), default=0))
        self._store.register("tiered.optimizer", small)
        self._store.add_guard(self._guard)

    def _drive(self, engine: Engine) -> None:
        """Have the units of ``engine`` updated from now on, in a thread of their own."""
        largest = max((bucket.nbytes for unit in engine.units for bucket in self._state.buckets[unit]), default=0)
        self._thread = thread = UpdateThread(engine, self._pipeline, buckets_bytes=3 * whole_pages(largest))
        self._store.add_producer(thread)
        engine.phase.updates_in_backward, engine.masters = self.in_backward, self._state
        engine.phase.must_resume = engine.phase.must_resume or self._is_behind
        buckets = {unit: self._state.buckets[unit] for unit in engine.units}
        engine.attach(thread, self.submit, buckets, self._state.follow)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one optimizer step; returns the result of ``closure``.

        Takes ownership of the gradients (``.grad`` is None afterwards) and freezes the hyperparameters. Sharded
        parameters are updated behind it, while the next forward runs; a caller that looks at them waits for that. The
        next call raises the error of such an update. Plain parameters are updated when this returns.
        """
        if self.is_held_back:
            return None
        with torch.enable_grad():
            loss = None if closure is None else outside(closure)
        with self._store.working_set.mark, torch.no_grad():
            if self.in_backward:
                self._check_unchanged()
            if self._plain is not None:
                late = [s for s in self._plain.trained() if s not in self._state.steps]
                self._add_state(self._plain, late) if late else None
            if self._engine is not None:
                self._step(self._engine)
            elif self._store.ranks is not None:
                self._check_step(self._store.ranks, ())
            if self._plain is not None:
                self._step_plain(self._plain)
        self._frozen = None
        return loss

    def _step(self, engine: Engine) -> None:
        due = engine.step()
        for unit in due:  # order: a refusal leaves the gradients, and nothing half done
            self._check(unit)
        if self._store.ranks is not None:
            self._check_step(self._store.ranks, due)
        try:
            with engine.schedule.hand_overs():
                for unit in due:
                    self.submit(unit)
        except BaseException as error:
            engine.phase.abandon(f"optimizer.step() failed: {error}")
            raise
        engine.step_ended()

    def _check_step(self, ranks: Ranks, due: Sequence[Unit]) -> None:
        """Raise UsageError, on all ranks, unless all are about to make the same step; blocks for all of them."""
        frozen = self._frozen or [self.rule.freeze(group) for group in self.param_groups]
        lines = [f"hyperparameters {group}" for group in frozen]
        lines += [] if self._plain is None else self._plain.describe()
        for unit in due:
            sources = unit.gradients.sources.items()
            lines += [
                f"a gradient of {s.name}, {each.describe()}" for s, each in sources if isinstance(each, SharedGradient)
            ]
        advice = "on all ranks the same hyperparameters, and gradients that are dropped, clipped and scaled alike"
        ranks.check_equal("optimizer.step()", lines, advice)
        ranks.comm_thread.end_first_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or zero them; sharded parameters have none after ``step``."""
        with self._store.working_set.mark:
            for each in () if self.is_held_back else (self._engine, self._plain):
                if each is not None:
                    each.zero_grad(set_to_none=set_to_none)

    def _begin(self) -> None:
        """Freeze the hyperparameters of the step that begins now."""
        self._frozen = [self.rule.freeze(group) for group in self.param_groups]
        self._hypers = {
            self._segments[parameter]: frozen
            for group, frozen in zip(self.param_groups, self._frozen, strict=True)
            for parameter in group["params"]
        }

    def _check_unchanged(self) -> None:
        if self._frozen is not None and self._frozen != [self.rule.freeze(group) for group in self.param_groups]:
            raise UsageError(
                'hyperparameters changed between backward and step() under update="backward", which has used the old'
                ' ones; expected changes after step(), or update="step"'
            )

    def _check(self, unit: Unit) -> list[Segment]:
        """Return the parameters of ``unit`` with a gradient; each has state from now on. Raises CapacityError."""
        managed = [s for s in unit.segments if s.has_gradient and s.parameter in self._segments]
        late = [s for s in managed if s not in self._state.steps]
        self._add_state(unit, late) if late else None
        return managed

    def _add_state(self, unit: StateUnit, segments: Sequence[Segment]) -> None:
        """Give parameters that were frozen when the optimizer was made their state, as torch does with a gradient."""
        self._state.add(unit, segments)
        if self._engine is not None:
            give_place(self._engine, self._pipeline, self._state.buckets)
            self._engine.expect_steps()

    def submit(self, unit: Unit) -> None:
        """Hand over the update of the parameters of ``unit`` with a gradient, and the gradients.

        Hyperparameters and step counts are those of now. Blocks in a backward while too much is pending.
        """
        engine = self._engine
        assert engine is not None
        if not engine.phase.has_begun:
            engine.phase.has_begun = True
            self._begin()
        unit.park()
        self._hand_over(engine, unit)
        unit.outdate()

    def _hand_over(self, engine: Engine, unit: Unit) -> None:
        gradients, managed = unit.gradients, self._check(unit)
        if not managed:
            gradients.drop(used=self.in_backward)
            return
        thread, gradient_key = self._thread, gradients.update_key
        limit = engine.layouts.shares.spare // 2 if self.in_backward else None
        buckets = [b for b in self._state.buckets[unit] if not b.segments.isdisjoint(managed)]
        parameter_keys = unit.keys_of(managed).values()
        state_keys = [bucket.key for bucket in buckets]  # order: promised before the wait, or they would be evicted
        if self.in_backward:  # the gradients stay leased from here on
            engine.schedule.hand_over([*parameter_keys, *state_keys], unrecorded=[gradient_key])
        else:
            engine.schedule.hand_over([*parameter_keys, gradient_key, *state_keys])
        try:
            thread.make_room(unit, 2 * unit.layout.shard_gradient_nbytes, limit)
        except BaseException:
            engine.schedule.take_back([*parameter_keys, gradient_key, *state_keys])
            raise
        hypers = {segment: self._state.count(segment, self._hypers[segment]) for segment in managed}
        taken = gradients.take(used=self.in_backward)
        update = UnitUpdate(unit, buckets, hypers, taken, engine.schedule)
        thread.submit(update, is_settled=engine.schedule.is_settled)

    def _step_plain(self, unit: PlainUnit) -> None:
        if self._is_behind:
            raise UsageError(f"{self.title}.step(): the store holds its state; expected store.resume() first")
        if self._engine is not None:
            self._engine.updates.finish_all()  # order: the pipeline serves one thread at a time
        self._begin()
        sources: dict[Segment, Source] = {
            s: Source(s.memory(), s.gradient(), None, self._state.count(s, self._hypers[s])) for s in unit.trained()
        }
        due = [b for b in self._state.buckets[unit] if not b.segments.isdisjoint(sources)]
        torch.autograd.graph.increment_version([s.parameter for s in sources])  # autograd sees no fused update
        for index, bucket in enumerate(due):
            self._store.working_set.prefetch([each.key for each in due[index : index + 1 + _READ_AHEAD]])
            self._pipeline.update([bucket], sources)

    def _guard(self, word: str) -> None:
        if word == "close":
            self._pipeline.close()
            withhold_steps(self._store, self.title, {s.name: n for s, n in self._state.steps.items()})
        if word in {"rollback", "resume"}:
            self._frozen = None

    def _description(self) -> dict[str, Any]:
        names = {parameter: segment.name for parameter, segment in self._segments.items()}
        return {
            "class": self.rule.name + ("" if self.rule.moments else " without momentum"),
            "state": self.format,
            "bucket_numel": self._state.bucket_numel,
            "groups": [[names[p] for p in group["params"]] for group in self.param_groups],
            "managed": self._state.managed,
        }

    def committed_state(self) -> dict[str, Any]:
        """Return the state that a commit must keep beside the buckets: step counts and hyperparameters."""
        return {
            **self._description(),
            "update_on": self._updates_on,
            "steps": {s.name: n for s, n in self._state.steps.items()},
            "without_moments": [s.name for s, n in self._state.steps.items() if n and s not in self._state.begun],
            "hyperparameters": options_of(self.param_groups),
            "given": self._given,
            "beside": {name: parameter.detach().clone() for name, parameter in self._beside.items()},
        }

    def load_committed_state(self, state: dict[str, Any]) -> None:
        """Take back a ``committed_state``; raises UsageError with a diff when the state is another optimizer's."""
        if not self._is_behind:  # groups that were added since the commit go
            del self.param_groups[len(state["groups"]) :], self._given[len(state["groups"]) :]
            self._segments = {parameter: self._segments[parameter] for parameter in self._parameters()}
        compare(state, self._description() | {"managed": state["managed"]})
        _, _, managed = layout_of(state, self._segments.values())
        self._state.lay_out(managed)
        groups, steps = self.reader().committed(state, [segment.name for segment in self._state.steps])
        before = given_of(state)
        warn_of_dropped(self.title, self._given, before, groups)
        self._given = before
        bare = set(state.get("without_moments", ()))  # older commits lack it
        self._state.steps = dict(zip(self._state.steps, steps, strict=True))
        self._state.begun = {s for s, n in self._state.steps.items() if n and s.name not in bare}
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine.update(group)
        for name, parameter in self._beside.items():
            parameter.data.copy_(state.get("beside", {}).get(name, parameter))  # older commits lack it
        self._is_behind = False


# -- optimizer ---------------------------------------------------------------------------------------------------------


class AdamW(StreamingOptimizer):
    """AdamW with decoupled weight decay, streaming its state through a store.

    ``params``: parameters or groups as for any torch optimizer, sharded by ``tiered.shard`` or plain; plain ones need
    ``store``. ``update="step"`` updates in ``step()``; ``update="backward"`` updates each unit as soon as its gradient
    is final, and ``step()`` only concludes. ``state`` names the format of the state; here with its bytes per bf16
    parameter, the parameter included:

    - ``state="exact"`` (12): fp32 moments and the bits of an fp32 master; the numbers are those of
      ``torch.optim.AdamW(fused=True)`` on fp32 masters
    - ``state="compact"`` (5.1): the moments in 8 bits with a scale per 128 elements, the master in 24 bits

    compact rounds by a hash of parameter, step and position: right on average, the same bits in every run, under any
    budget and after a resume. fp32 parameters are their own masters; fp64 ones keep exact state in any format.

    ``foreach`` and ``fused`` are torch's and change nothing: the arithmetic is always that of ``fused=True``.
    ``amsgrad``, ``capturable`` and ``differentiable`` can only be False.

    A store that already holds this optimizer's state is adopted: call ``store.resume()``. Not thread-safe. Raises
    ValueError for hyperparameters out of range, TypeError for a switch of torch's that this lacks, UsageError for
    unknown words or a store that holds another optimizer, CapacityError when the device has no room for the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        _need_false("AdamW", amsgrad=amsgrad, capturable=capturable, differentiable=differentiable)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, AdamWRule(), update=update, state=state, store=store)


class SGD(StreamingOptimizer):
    """Stochastic gradient descent with momentum, streaming its state through a store.

    The numbers are those of ``torch.optim.SGD(fused=True)`` on fp32 masters. ``params``, ``update``, ``state``,
    ``store``, torch's switches and errors as for ``tiered.AdamW``; bytes per bf16 parameter are 8.1 and 4.0,
    without momentum 4.1 and 3. Momentum in any group lays a buffer out for all groups. An optimizer that was made
    without momentum cannot be given any later.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        _need_false("SGD", differentiable=differentiable)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        params = list(params)
        groups = [group for group in params if isinstance(group, dict)]
        with_momentum = any(group.get("momentum", momentum) for group in groups) if groups else momentum != 0
        rule = SGDRule(with_momentum=bool(with_momentum))
        super().__init__(params, defaults, rule, update=update, state=state, store=store)


class Lion(StreamingOptimizer):
    """Lion, the sign of an interpolated momentum with decoupled weight decay, streaming its state through a store.

    On fp32 masters. ``params``, ``update``, ``state``, ``store`` and errors as for ``tiered.AdamW``; bytes per bf16
    parameter are 8.1 and 4.0. A usual learning rate is a third to a tenth of AdamW's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        update: str = "step",
        state: str = "exact",
        store: Store | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, LionRule(), update=update, state=state, store=store)


def _need_false(name: str, **switches: bool) -> None:
    for switch, value in switches.items():
        if value:
            raise TypeError(f"tiered.{name}({switch}={value!r}) is not supported; expected {switch}=False")
