"""shard: give a model's parameters to a store, divide them into units, and hook the model up.

The values move a unit at a time; the engine does all work at run time afterwards. At commit, rollback, resume and close
of the store, pending work is finished, dropped or refused. Under torch.compile a graph would take the parameters past
tiered, and the code that moves them in and out cannot be traced. So the compiler leaves all of the model alone, and
compiles the code around it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from tiered.bytes.host_tensor import address_of
from tiered.bytes.interrupt import INTERRUPTS, outside
from tiered.errors import StepAbandonedError, UsageError
from tiered.ranks.comm import NullComm
from tiered.ranks.ranks import Ranks, phase
from tiered.store.generations.registry import taking_apart
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.store.values import values
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier
from tiered.units import format_bytes
from tiered.zero.activations.activations import ActivationRule, words_of
from tiered.zero.compute_device import check_memory, check_update_on, give_memory, move_buffers, named_device, tier_of
from tiered.zero.construct import ConstructedParameter
from tiered.zero.engine import Engine
from tiered.zero.formats.budget import share_out_as_asked
from tiered.zero.layout import Shares, UnitRule, divide_into_units
from tiered.zero.model_state import ModelState, RandomState, hook_state_dicts, refuse_missing
from tiered.zero.one_rank import DistributedLater, refuse_ranks, refuse_wrapped
from tiered.zero.optimizer.fp32_masters import Masters, masters_nbytes, write_masters
from tiered.zero.parameters.parameter import TieredParameter, without_dispatch
from tiered.zero.parameters.tensor_without_bytes import placeholder
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives
from tiered.zero.step import in_graph_task
from tiered.zero.weights import Weights, find_in_place

__all__ = ["accumulating", "eager", "prepare_for", "returning", "shard", "stay_eager"]


_log = logging.getLogger("tiered")

_REASON = "the modules of a sharded model move their parameters in and out, and run as they are"

_NOT_TRACED = (
    *("bytes", "store", "tiers", "zero.activations", "zero.engine", "zero.formats", "zero.gradients", "zero.optimizer"),
    *("zero.parameters", "zero.shard", "zero.step", "zero.unsharded"),
)
"""The modules that run a model. torch_func_guard is traced: it stands before transforms of ordinary tensors, too."""


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one that torch.compile does not look into, nor into the functions that it calls."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    return disabled


def stay_eager(module: nn.Module) -> None:
    """Have torch.compile leave calls of ``module`` as they are; ``module.compile()`` warns the user of that."""
    if module._compiled_call_impl is not None:
        _warn(module)
    vars(module)["_compiled_call_impl"] = eager(module._call_impl)
    if type(module).compile is nn.Module.compile:
        module.compile = functools.partial(_warn, module)  # type: ignore[method-assign]
    _skip_own_functions()


@functools.cache
def _skip_own_functions() -> None:
    """Have torch.compile trace no function that runs a model, such as those autograd calls for saved tensors."""
    for name in _NOT_TRACED:
        torch._dynamo.trace_rules.add(f"tiered.{name}")


def _warn(module: nn.Module, *_: Any, **__: Any) -> None:
    _log.warning("compile() of %s, which is sharded, changes nothing: %s", type(module).__name__, _REASON)


# -- events of the store -----------------------------------------------------------------------------------------------


def prepare_for(engine: Engine, word: str) -> None:
    """Get ``engine`` ready for an event of the store: "commit", "rollback", "resume" or "close".

    Pending updates are finished before a close and dropped for a return; a commit asks for them itself. A step
    that was left half done is not committed by a close: it is rolled back. A step whose updates are dropped stays
    abandoned where the event does not come, as the store may refuse it yet. Raises UsageError at the wrong time, and
    the error of an update that failed.
    """
    if word == "commit":
        engine.check_between_steps("commit")
        return
    if in_graph_task():
        raise UsageError(f"{word} inside a backward; expected between steps")
    if word != "close":
        engine.store.wait_for_commit()  # order: the first one may be running
        if not engine.store.generation:
            return  # there is nothing to return to, so nothing is given up
    is_half_done = engine.phase.is_half_done
    failure: Exception | None = None
    is_committing = word == "close" and engine.store.durable
    if is_committing and not is_half_done:
        try:
            engine.updates.finish_all()
        except Exception as error:  # whatever it is, the step is half done
            failure, is_half_done = error, True
    is_half_done = is_half_done or engine.updates.is_busy or engine.updates.failure is not None
    if is_half_done and word != "close":  # which nothing refuses any more
        engine.phase.begin_return(f"its updates were dropped for a {word} that did not come to its end")
    _forget_step(engine)
    if is_committing and is_half_done:
        _drop_half_done(engine, failure)


@contextmanager
def returning(engine: Engine) -> Iterator[None]:
    """Hold ``engine`` back while the store loads the last commit, and let it go on where that has come to its end."""
    engine.phase.begin_return("the return to the last commit did not come to its end")
    yield
    engine.phase.restored()


def _drop_half_done(engine: Engine, failure: Exception | None) -> None:
    """Keep ``close`` from committing a step left half done, because of ``failure`` if that was not raised yet."""
    engine.store.wait_for_commit()  # order: the first one may be running
    if engine.store.generation:
        engine.store.rollback()
    elif failure is None:
        raise StepAbandonedError("closed in the middle of a step, and nothing was ever committed: all is dropped")
    if failure is not None:
        raise failure


def _forget_step(engine: Engine) -> None:
    """Forget the step under way; the bytes in the store are the truth."""
    engine.updates.cancel()
    engine.calls.clear()
    engine.backward.reset()
    engine.activations.swapped.reset()
    engine.phase.forget_step()
    engine.plan.lent.clear()
    for unit in engine.units:
        unit.num_ops = 0
        unit.outdate()
    try:
        engine.open_units.park_all()
        for unit in engine.units:
            unit.gradients.drop()
        engine.gradients.end_spares()
    finally:  # of a device that has failed, whose copies keep leases
        engine.tier.forget()
        if isinstance(comm := engine.units[0].comm, UnitCollectives):
            comm.end()
    engine.backward.forget_touches()
    engine.schedule.forget()


# -- shard -------------------------------------------------------------------------------------------------------------


_CLASSES = {
    "parameters": "parameters",
    "state": "optimizer state",
    "master": "optimizer state",
    "gradient": "gradients",
    "activation": "activations",
}
"""The names that reports give to the keys under ``model/``."""


def shard(
    model: nn.Module,
    store: Store,
    *,
    unit: UnitRule = None,
    stage: int = 3,
    param_dtype: torch.dtype | None = None,
    weights: Mapping[str, Any] | str | Path | Sequence[str | Path] | None = None,
    device: str | torch.device = "auto",
    activations: ActivationRule = "auto",
    hold: str | int = "auto",
    update_on: str = "auto",
) -> nn.Module:
    """Move the parameters of ``model`` into ``store`` and return the same model, ready to train.

    ``unit`` says which modules move together (see ``divide_into_units``). ``param_dtype`` casts floating parameters;
    the values before the cast become the fp32 masters of those that require a gradient now. ``weights``: a state dict,
    of numpy too, or safetensors file(s) or a folder of them, for a model on meta; read a unit at a time. ``hold``:
    how much of the budget keeps bytes in DRAM for good: "auto", 0, or a size such as "2GiB". ``activations``: the
    treatment of the tensors that autograd saves in each unit, "keep" (in ordinary memory), "recompute" (torch's
    non-reentrant checkpoint: batch norm's statistics are updated twice), "swap" (through the store) or "auto"; a word
    for all, a mapping from unit names, or a function (name, module) -> word; see ``Activations``. ``stage``: over ranks
    3 gathers a unit for each use, 2 keeps it until its update, 1 keeps the gradients of ``no_sync`` in DRAM, too; on
    one rank they are the same. ``device``: where the model computes, "auto" for the accelerator if there is one, a few
    units at a time. ``update_on``: where the optimizer does: "cpu", "device", "auto" (the shorter). A resume keeps it.

    A store that already holds this model is adopted as it is: its values stay, a model built on the meta device needs
    no ``weights``, and ``store.resume()`` must come before the first forward. Parameters keep their objects, names,
    shapes and ``requires_grad``. Blocks while bytes move.

    Raises CapacityError for a budget that is too small (with the smallest one that works) or too little device space,
    UsageError for a store that holds another model (with the differences), TypeError for parameters it cannot keep.
    """
    with phase(_ranks_of(model, store), "tiered.shard"):
        _check(model, store, stage=stage, param_dtype=param_dtype)
        tier = _tier_for(store, device, update_on)
        committed = store.registered_state("tiered.model") if store.durable else None
        source = Weights(model, weights, is_committed=committed is not None)
        modules = divide_into_units(model, unit)
        words = words_of(activations, {"root": model, **modules})
        units = _make_units(model, modules, store, param_dtype, tier)
        if committed is not None:
            _adopt(store, model, units, committed)
        shares = _shares_of(units, store.working_set.budget_bytes, hold, swaps="swap" in words.values(), stage=stage)
        memory = tier, [unit.layout for unit in units], store.device_memory, stage
        check_memory(*memory, updates=update_on != "cpu")
    _check_equal(store, units, source, [str(shares), f"activations {words}, {update_on=}"])
    with phase(store.ranks, "tiered.shard: values"):
        masters = _fill(store, units, source, adopt=committed is not None)
    give_memory(*memory, updates=update_on != "cpu", ranks=store.ranks)  # order: once the values have left the device
    with phase(store.ranks, "tiered.shard: hooks"):
        move_buffers(model, tier.device)
        engine = Engine(store, model, units, shares=shares, masters=masters)
        engine.phase.must_resume = engine.layouts.is_stale = engine.layouts.drops_frozen = committed is not None
        engine.layouts.update_on, engine.layouts.hold_is_auto = update_on, hold == "auto"
        engine.activations.set_words(words, shares.activations)
        _hook(model, modules, units, engine)
        _register(store, model, engine)
    _log.info("sharded into %d units, %s held in DRAM", len(units), format_bytes(shares.held))
    return model


def _tier_for(store: Store, device: str | torch.device, update_on: str) -> ComputeTier:
    """Return the memory in which the model computes. Raises UsageError for what does not work there."""
    tier = tier_of(named_device(device, store.device_memory), store)
    check_update_on(update_on, tier)
    return tier


def _give_threads(ranks: Ranks) -> None:
    """Have torch use this rank's part of the cores: torchrun has set OMP_NUM_THREADS=1 where the user has set none."""
    num = len(os.sched_getaffinity(0)) // ranks.local_world
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1" and num > 1:
        torch.set_num_threads(num)
        _log.info("%d threads for updates: torchrun's OMP_NUM_THREADS=1 is for one; set another to keep it", num)


def _check_equal(store: Store, units: Sequence[Unit], source: Weights, others: Sequence[str]) -> None:
    """Raise UsageError unless all ranks have the same parameters and values, and ``others``; connect their devices."""
    ranks = store.ranks
    if ranks is None:
        return
    _give_threads(ranks)
    lines = [
        f"parameter {segment.name} of unit {unit.name!r}, {segment.spec}, {source.digest(segment)}"
        for unit in units
        for segment in unit.segments
    ]
    source.close()
    advice = "the same model with the same values on all ranks: torch.manual_seed(0) before it is built, or weights="
    ranks.check_equal("tiered.shard", lines, advice)
    advice = "the same arguments of shard, and the same dram= and device_memory= of the store, on all ranks"
    where = f"device={units[0].tier.device.type!r}, device_memory={store.device_memory}"
    ranks.check_equal("tiered.shard", [*others, where], advice)
    if isinstance(comm := units[0].comm, UnitCollectives):
        comm.connect(units[0].tier.device)


def _adopt(store: Store, model: nn.Module, units: Sequence[Unit], committed: dict[str, Any]) -> None:
    """Lay the units out as they lie in ``store``; raises UsageError where it holds another model, or only a part."""
    with taking_apart("tiered.model", by="model"):
        state = ModelState(model, units)
        state.compare(committed)
        state.adopt_layout(committed)
    refuse_missing(store, (key for unit in units for key in unit.keys))


def _register(store: Store, model: nn.Module, engine: Engine) -> None:
    """Have ``store`` report its calls to ``engine``, and commit the model's small state with the keys."""
    hook_state_dicts(model, engine)
    store.add_guard(functools.partial(prepare_for, engine), returning=functools.partial(returning, engine))
    if isinstance(engine.tier, AcceleratorTier):
        store.working_set.recorder.attach(engine.tier.copies.clock, engine.tier.statistics)
    for prefix, name in _CLASSES.items():
        store.working_set.recorder.classify(f"model/{prefix}/", name)
    if store.durable:
        store.register("tiered.model", ModelState(model, engine.units, engine.expect_steps))
        store.register("tiered.random", RandomState())


def _shares_of(units: Sequence[Unit], budget_bytes: int, hold: str | int, *, swaps: bool, stage: int) -> Shares:
    """Return the shares of the budget; ``swaps``: activations go to the store, too."""
    layouts = [unit.layout for unit in units]
    shares = share_out_as_asked(layouts, budget_bytes, hold, stage=stage)
    if hold == "auto" and swaps:  # a byte of activations saves more than one of optimizer state
        held = min(shares.held, sum(unit.layout.shard_nbytes for unit in units))
        shares = share_out_as_asked(layouts, budget_bytes, held, stage=stage)
    return shares


def _ranks_of(model: Any, store: Any) -> Ranks | None:
    """Return the ranks of ``store``. Raises TypeError for what is no model, or no store."""
    if not isinstance(model, nn.Module) or not isinstance(store, Store):
        raise TypeError(
            f"tiered.shard({type(model).__name__}, {type(store).__name__}); expected a Module and a tiered.Store"
        )
    return store.ranks


def _check(model: Any, store: Any, *, stage: int, param_dtype: Any) -> None:
    """Raise for arguments that ``shard`` cannot take, and for a model or a store that was sharded before."""
    refuse_ranks(store)
    refuse_wrapped(model, store)
    if param_dtype is not None and not isinstance(param_dtype, torch.dtype):
        raise TypeError(f"param_dtype={param_dtype!r}; expected a torch.dtype such as torch.bfloat16, or None")
    if stage not in (1, 2, 3):
        raise ValueError(f"stage={stage}; expected 1, 2 or 3")
    if any(isinstance(p, TieredParameter) and not _constructed(p) for p in model.parameters()):
        raise UsageError("tiered.shard on a model that is sharded already; expected each model once")
    strangers = [each for each in map(_constructed, model.parameters()) if each and each.owner.store is not store]
    if strangers:
        raise UsageError(
            f"tiered.shard of {strangers[0].segment.name}, constructed in {strangers[0].owner.store!r}, into {store!r};"
            " expected the store that construct was given"
        )
    if store.registered("tiered.model") or (not store.durable and "model/parameters/root" in store):
        raise UsageError("tiered.shard of a second model into one store; expected one store per model")


def _make_units(
    model: nn.Module, modules: dict[str, nn.Module], store: Store, param_dtype: torch.dtype | None, tier: ComputeTier
) -> list[Unit]:
    """Give each parameter to the innermost unit above the first module that names it; the root unit comes first."""
    members: dict[str, list[Segment]] = {"": [], **{name: [] for name in modules}}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        owner = max((n for n in modules if module_name == n or module_name.startswith(f"{n}.")), key=len, default="")
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{module_name}.{name}" if module_name else name
            members[owner].append(_segment(full, parameter, param_dtype, tier.device))
    if not seen:
        raise UsageError("tiered.shard of a model without parameters; expected at least one")
    _refuse_shared_memory([segment for segments in members.values() for segment in segments])
    named = {name: segments for name, segments in members.items() if segments or not name}
    comm = NullComm() if store.ranks is None else UnitCollectives(store.ranks, store.working_set, tier)
    return [Unit(name or "root", segments, store.working_set, tier, comm) for name, segments in named.items()]


def _refuse_shared_memory(segments: Sequence[Segment]) -> None:
    """Raise UsageError for two parameters that overlap in memory: in the store each would have values of its own.

    Columns of one matrix lie between each other, and do not overlap unless they begin at one place.
    """
    ranges = []
    names = {segment.parameter: segment.name for segment in segments}
    for segment in segments:
        parameter = segment.parameter
        origin = _origin(parameter)
        if origin in names:
            raise _shared_memory(names[origin], segment.name)
        if isinstance(parameter, TieredParameter) or parameter.is_meta or not parameter.numel():
            continue
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = address_of(parameter)
        is_dense = last + 1 == parameter.numel()
        ranges.append((start, start + (last + 1) * parameter.element_size(), is_dense, segment.name))
    ranges.sort()
    for (before, end, is_dense, name), (start, _, is_other_dense, other) in itertools.pairwise(ranges):
        if start < end and (start == before or (is_dense and is_other_dense)):
            raise _shared_memory(name, other)


def _origin(parameter: nn.Parameter) -> nn.Parameter | None:
    """Return the parameter that ``nn.Parameter()`` was given for this one while the model was constructed."""
    constructed = _constructed(parameter)
    return constructed.origin() if constructed and constructed.origin else None


def _constructed(parameter: nn.Parameter) -> ConstructedParameter | None:
    """Return the place of ``parameter`` where ``tiered.construct`` has made it; None where it has not."""
    unit: Any = parameter.segment.unit if isinstance(parameter, TieredParameter) else None
    return unit if isinstance(unit, ConstructedParameter) else None


def _shared_memory(name: str, other: str) -> UsageError:
    return UsageError(
        f"parameters {name} and {other} are two that share memory; expected one that both modules name, as in"
        " head.weight = emb.weight, or memory of its own for each"
    )


def _segment(name: str, parameter: nn.Parameter, param_dtype: torch.dtype | None, device: torch.device) -> Segment:
    is_here = parameter.device.type in {"cpu", "meta"} or parameter.device == device
    if parameter.is_complex() and parameter.requires_grad:
        raise TypeError(
            f"parameter {name}: {parameter.dtype}; expected real numbers: nn.Parameter(torch.view_as_real(values)), and"
            " torch.view_as_complex(parameter) in the forward, which trains as the complex one does"
        )
    if parameter.layout is not torch.strided or parameter.is_quantized or not is_here:
        raise TypeError(
            f"parameter {name}: {parameter.layout} on {parameter.device}; expected a dense tensor on the CPU"
            f"{'' if device.type == 'cpu' else f' or {device}'}"
        )
    if not isinstance(parameter, TieredParameter) and type(parameter) is not nn.Parameter:
        raise TypeError(f"parameter {name}: subclass {type(parameter).__name__}; expected a plain nn.Parameter")
    cast = param_dtype if param_dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
    return Segment(name, parameter, cast)


def _fill(store: Store, units: Sequence[Unit], source: Weights, *, adopt: bool) -> Masters:
    """Write each unit's values, and leave the masters of cast parameters, which are returned.

    With ``adopt`` the store's own values stay.
    """
    working_set = store.working_set
    if not adopt:
        in_place = find_in_place(store, units, source)
        cast = [unit for unit in units if any(map(source.is_cast, unit.segments))]
        nbytes = sum(unit.layout.shard_nbytes for unit in units) - sum(spec.nbytes for spec, _ in in_place.values())
        if store.durable:  # a second set of the keys that steps write
            nbytes += sum(unit.layout.shard_gradient_nbytes for unit in units)
        nbytes += sum(masters_nbytes(unit.segments) for unit in cast)
        store.reserve_space(nbytes, scratch=not store.durable)
        for key, (spec, ranges) in in_place.items():
            values.adopt(working_set, key, spec, ranges)
    parameters = [segment.parameter for unit in units for segment in unit.segments]
    ranks = store.ranks if any(map(_constructed, parameters)) else None  # which bring them together
    with closing(source), nullcontext() if ranks is None else ranks.together("tiered.shard: values"):
        for unit in units:
            INTERRUPTS.look()
            if not adopt:
                _write_unit(store, unit, source, in_place)
                if unit in cast:
                    write_masters(store, unit, functools.partial(_copy_master, source))
            for segment in unit.segments:
                _convert(segment, working_set)
    return Masters(store, units)


def _copy_master(source: Weights, segment: Segment, out: torch.Tensor) -> None:
    wait = source.begin_copy_piece(segment, out)
    if wait is not None:
        wait()


def _write_unit(store: Store, unit: Unit, source: Weights, in_place: Collection[str]) -> None:
    """Write the values of ``unit``, but for the keys ``in_place``; the next unit is read while they are written."""
    keys, waits = [span.key for span in unit.layout.spans if span.key not in in_place], list[Callable[[], None]]()
    with ExitStack() as leases:
        try:
            for number, span in enumerate(unit.layout.spans):
                if span.key in in_place:
                    continue
                store.working_set.create(span.key, span.shard_nbytes)
                lease = store.working_set.lease(span.key, "w")
                leases.callback(lease.release)
                end = 0
                for segment in unit.segments:  # those of a span are in the order of their places
                    if segment.span == number:
                        piece = segment.piece(lease.tensor)
                        if segment.stretch:
                            lease.tensor[end : segment.shard_offset].zero_()
                            end = segment.shard_offset + piece.nbytes
                        wait = source.begin_copy_piece(segment, piece)
                        waits += [] if wait is None else [wait]
                lease.tensor[end:].zero_()
            for wait in waits:
                wait()
        except BaseException:
            source.close()  # order: nothing is read into the leased bytes any more when the leases end
            raise
    store.working_set.swap_out(keys)


def _convert(segment: Segment, working_set: Residency) -> None:
    """Make the parameter a TieredParameter of ``segment``, without values of its own."""
    parameter = segment.parameter
    if isinstance(parameter, TieredParameter):
        constructed: Any = parameter.segment.unit
        constructed.park()
        working_set.delete([constructed.key])
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # order: a TieredParameter refuses a swap
    with without_dispatch():
        blank = placeholder(segment.shape, segment.dtype, segment.unit.tier.device)
        if torch._has_compatible_shallow_copy_type(parameter, blank):
            parameter.data = blank
        else:  # a device whose tensors are of another kind: the object changes its insides
            swap_tensors(parameter, nn.Parameter(blank, parameter.requires_grad))  # type: ignore[no-untyped-call]
    parameter.__class__ = TieredParameter
    parameter.segment = segment  # type: ignore[attr-defined]


def _hook(model: nn.Module, modules: dict[str, nn.Module], units: Sequence[Unit], engine: Engine) -> None:
    by_name = {unit.name: unit for unit in units}
    unit_of = {module: by_name[name] for name, module in modules.items() if name in by_name}
    unit_of[model] = by_name["root"]
    vars(model)["_is_accelerate_prepared"] = True  # accelerate's word: its prepare() leaves the model as it is
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = functools.partial(accumulating, engine)  # accelerate's, FSDP's and DDP's word
    for module in model.modules():
        vars(module)["_ddp_params_and_buffers_to_ignore"] = DistributedLater()  # DistributedDataParallel's word
        vars(module)["__deepcopy__"] = functools.partial(_copied, module)
        if module is not model and not any(True for _ in module.parameters()):
            continue
        unit = unit_of.get(module)
        begin_call = functools.partial(engine.calls.begin_call, unit)
        module.register_forward_pre_hook(begin_call, prepend=True, with_kwargs=True)
        module.register_forward_hook(engine.calls.end_call, with_kwargs=True, always_call=True)
        stay_eager(module)
        _wrap_methods(module, engine, unit)
        if unit is not None and module is not model and engine.activations.may_recompute(unit):
            engine.activations.wrap(unit, module)
    for segment in (segment for unit in units for segment in unit.segments):
        engine.backward.watch(segment.parameter)


@contextmanager
def accumulating(engine: Engine) -> Iterator[None]:
    """A block in which backwards only add to the gradients: they update nothing, and exchange nothing with ranks."""
    engine.phase.num_accumulating += 1
    try:
        yield
    finally:
        engine.backward.settle()
        engine.phase.num_accumulating = max(0, engine.phase.num_accumulating - 1)  # a rollback has ended all


def _wrap_methods(module: nn.Module, engine: Engine, unit: Unit | None) -> None:
    """Let the methods that the user's class defines beside ``forward`` touch parameters as a forward may."""
    for cls in type(module).__mro__:
        if cls.__module__.split(".")[0] == "torch" or not issubclass(cls, nn.Module):
            continue
        for name, function in vars(cls).items():
            special = name.startswith("__") or name in {"forward", "extra_repr"} or hasattr(nn.Module, name)
            suspended = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
            if special or suspended or not inspect.isfunction(function) or name in vars(module):
                continue
            setattr(module, name, _wrap(getattr(module, name), module, engine, unit))


def _wrap(method: Callable[..., Any], module: nn.Module, engine: Engine, unit: Unit | None) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with engine.calls.running(module, unit) as hand_out:
            return hand_out(outside(method, *args, **kwargs))

    return eager(call)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return ``copy.deepcopy`` of ``module`` as it was before ``shard``; its parameters may refuse the copy."""
    made: Any = type(module).__new__(type(module))
    memo[id(module)], state = made, {}
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value = type(value)((key, hook) for key, hook in value.items() if not _is_own(hook))
        if name != "_compiled_call_impl" and not _is_own(value):
            state[name] = copy.deepcopy(value, memo)
    made.__setstate__(state)
    return made  # type: ignore[no-any-return]


def _is_own(value: Any) -> bool:
    """Return whether ``value`` is a hook, a method or a mark of tiered's, as it stands or wrapped by torch."""
    for name in ("_torchdynamo_orig_callable", "hook", "func", "__func__"):
        value = getattr(value, name, value)
    return str(getattr(value, "__globals__", {}).get("__name__") or type(value).__module__).startswith("tiered.")
