"""sharded_state_dict: a sharded model and its optimizer for torch.distributed.checkpoint, each rank its own pieces."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

from tiered.errors import UsageError
from tiered.interop.checkpoint_shards import FAILED, LOADED, NOT_LOADED, SavedCopies, Shard
from tiered.ranks.ranks import phase
from tiered.zero.model_state import ModelValues
from tiered.zero.optimizer.fp32_masters import leased
from tiered.zero.optimizer.optimizer_state import rounds_to
from tiered.zero.optimizer.state_dicts import StateAccess
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.state_dict_copies import memory_for_copies

__all__ = ["sharded_state_dict"]

_WORD = "tiered.sharded_state_dict"


@contextmanager
def sharded_state_dict(
    model: nn.Module,
    optimizer: StateAccess | None = None,
    *,
    mode: Literal["r", "rw"] = "r",
    master_weights: bool = False,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the state dicts of ``model`` and ``optimizer`` for ``torch.distributed.checkpoint``; between steps only.

    They have the names and the nesting of ``torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)``,
    so that FSDP2 and plain torch read what is saved here, and the other way round; the second is {} without an
    optimizer. Each tensor of the store is one that only ``save`` and ``load`` can use, inside the block: for them it is
    this rank's rectangles of at most 64 MiB, read or written one at a time. Nothing is gathered, and 256 MiB are in
    memory. torch's writer of safetensors files keeps one piece of each tensor alone, and is refused where there are
    more: ``tiered.save_pretrained`` writes such files. All ranks come here together.

    ``mode="rw"`` is for ``load``: loaded values wait in a file beside the store's, 4 bytes for each element of a
    parameter, of a moment and of a master, and replace the store's when the block ends; an error changes nothing.
    Tensors that the checkpoint lacks, where the planner allows that, stay. ``master_weights``: the model's trained bf16
    parameters are their fp32 masters, for programs that keep fp32 weights; otherwise masters are a part of the
    optimizer's state, by the name "master". Loaded fp32 values become masters in either case.

    Raises UsageError at the wrong time, for groups of another optimizer, and for values that do not fit; CapacityError
    where the drive has no room for the values that wait. A drive that fails while values are replaced ends the step:
    ``store.rollback()``.
    """
    if mode not in ("r", "rw"):
        raise ValueError(f"{_WORD}: expected mode='r' to save or 'rw' to load, got {mode!r}")
    if optimizer is not None and not isinstance(optimizer, StateAccess):
        raise UsageError(
            f"{_WORD}: expected an optimizer of tiered's, got {type(optimizer).__name__}; one of torch's own has"
            " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    source = _Source(model, optimizer, is_target=mode == "rw", master_weights=master_weights)
    try:
        ranks = source.store.ranks
        if ranks is not None:
            ranks.check_equal(_WORD, [mode, str(master_weights), str(optimizer is None)], "the same call on all ranks")
        if mode == "r":
            yield source.model_state, source.optimizer_state
        else:
            with phase(ranks, _WORD):
                source.make_targets()
            failure = None
            with phase(ranks, _WORD):
                try:
                    yield source.model_state, source.optimizer_state
                except CheckpointException as error:  # which is no Exception to torch
                    failure = error
                flags = source.loaded(failure)
            source.agree_on_loaded(flags, failure)
            with phase(ranks, _WORD):
                source.check()
            source.apply()
    finally:
        source.end()


class _Source:
    """The two state dicts of a model and its optimizer, and the values that are loaded into them."""

    def __init__(
        self, model: nn.Module, optimizer: StateAccess | None, *, is_target: bool, master_weights: bool
    ) -> None:
        values = ModelValues(model, _WORD)
        if not values.engines:
            raise UsageError(
                f"{_WORD}: {type(model).__name__} is not sharded; expected a model that tiered.shard returned"
            )
        if optimizer is not None:
            optimizer.check_idle(_WORD)
        self.store = values.engines[0].store
        self.model_state: dict[str, Any] = {}
        self.optimizer_state: dict[str, Any] = {}
        self._model, self._optimizer, self._engines = model, optimizer, values.engines
        self._is_target, self._has_master_weights = is_target, master_weights
        self._copies = SavedCopies()
        self._lock = threading.Lock()  # a writer of checkpoints may have threads
        self._weights: dict[Segment, Shard] = {}
        self._kept: dict[Segment, dict[str, Shard]] = {}
        self._steps: dict[Segment, torch.Tensor] = {}
        self._ids: list[list[str]] = []
        self._names: dict[Segment, str] = {}
        self._groups: list[dict[str, Any]] = []
        self._plain: dict[str, str] = {}  # tensors in ordinary memory, and what is none: by name, the model's own
        for full, value in values.state.items():
            name = _plain_name(model, full)
            segment = values.segment_of(value) if isinstance(value, torch.Tensor) else None
            if segment is not None:
                if segment not in self._weights:
                    self._weights[segment] = self._weight(name, segment)
                self.model_state[name] = self._weights[segment].looks()
            else:
                self._plain[name] = full
                self.model_state[name] = copy.deepcopy(value) if is_target else value
        if optimizer is not None:
            self._take_optimizer(optimizer)

    def end(self) -> None:
        """Refuse all uses from now on, and forget what was loaded."""
        for shard in self._shards():
            shard.end()

    def _shards(self) -> Iterator[Shard]:
        """Yield all tensors of the store."""
        yield from self._weights.values()
        for kinds in self._kept.values():
            yield from kinds.values()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _weight(self, name: str, segment: Segment) -> Shard:
        is_cast = segment.dtype == torch.bfloat16 and (segment.trainable or segment.was_trainable)
        if not (is_cast and self._has_master_weights):
            target_dtype = torch.float32 if is_cast else segment.dtype
            return Shard(name, segment, self._reader(segment), dtype=segment.dtype, target_dtype=target_dtype)
        if not self._is_target and (self._optimizer is None or segment not in self._optimizer.kept.steps):
            raise UsageError(
                f"{_WORD}: master_weights=True without the optimizer that has the master of {name}; expected optimizer="
                " of the training, or master_weights=False"
            )
        return Shard(name, segment, self._reader(segment, "master"), dtype=torch.float32)

    def _reader(self, segment: Segment, kind: str = "") -> Callable[[range], torch.Tensor]:
        """Return a call that reads elements of a parameter, or a ``kind`` of its state: copies, (numel,)."""

        def read(elements: range) -> torch.Tensor:
            with self._lock, self.store.working_set.mark:
                if kind:
                    assert self._optimizer is not None
                    return self._copies.add(self._optimizer.kept.read(segment, elements, kind))
                first = segment.stretch.start
                with leased(self.store, segment.unit.keys[segment.span], "r") as span:
                    values = segment.piece(span)[elements.start - first : elements.stop - first].clone()
                    del span
                return self._copies.add(values)

        return read

    def _take_optimizer(self, optimizer: StateAccess) -> None:
        """Make the state dict of ``optimizer``."""
        by_parameter = {id(p): _plain_name(self._model, name) for name, p in self._model.named_parameters()}
        names: list[str] = []
        state: dict[str, dict[str, torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                segment = optimizer.segment_of(parameter)
                weight = self._weights.get(segment)
                if weight is None and isinstance(segment.unit, Unit):
                    raise UsageError(
                        f"{_WORD}: the optimizer trains {segment.name}, which is not in {type(self._model).__name__};"
                        " expected the whole model that it was made for"
                    )
                names.append(name := weight.name if weight else by_parameter.get(id(parameter), segment.name))
                dtype = optimizer.kept.dtype_of(segment)
                kinds = self._kept[segment] = {
                    kind: Shard(f"{name}.{kind}", segment, self._reader(segment, kind), dtype=dtype)
                    for kind in self._kinds(optimizer, segment, group)
                }
                if kinds:
                    state[name] = {kind: each.looks() for kind, each in kinds.items()}
                if kinds and optimizer.rule.name != "SGD":  # as torch has it
                    steps = torch.tensor(float(optimizer.kept.steps.get(segment, 0)), dtype=torch.float32, device="cpu")
                    state[name]["step"] = self._steps[segment] = steps
                self._names[segment] = name
        groups = copy.deepcopy(optimizer.groups_for(names))
        left_out = {"param_names", *(("initial_lr",) if self._is_target else ())}  # which schedules bring back
        kept = [{key: value for key, value in group.items() if key not in left_out} for group in groups]
        self._ids = [list(group["params"]) for group in groups]
        self.optimizer_state |= {"state": state, "param_groups": kept}

    def _kinds(self, optimizer: StateAccess, segment: Segment, group: dict[str, Any]) -> list[str]:
        """Return the names of the moments and the master that a state dict has of one parameter."""
        is_wanted = self._is_target and segment.parameter.requires_grad
        if not is_wanted and segment not in optimizer.kept.steps:
            return []  # never trained
        makes_some = optimizer.rule.makes_moments(optimizer.rule.freeze(group))
        kinds = [moment.name for moment in optimizer.rule.moments if makes_some]
        kinds += ["master"] * optimizer.kept.has_master(segment)
        is_weight = self._has_master_weights and segment in self._weights
        return [kind for kind in kinds if not (kind == "master" and is_weight)]

    # -- replacing -----------------------------------------------------------------------------------------------------

    def make_targets(self) -> None:
        """Make room for what is loaded. Raises CapacityError."""
        shards = list(self._shards())
        next_step = "free some, or load the model and then the optimizer"
        memory = memory_for_copies(self.store.working_set.space.devices, [s.nbytes for s in shards], _WORD, next_step)
        with closing(memory) if memory is not None else nullcontext():
            empty = partial(torch.empty_strided, device="cpu") if memory is None else memory.empty
            for shard in shards:
                shard.target = empty((len(shard.elements),), (1,), dtype=shard.target_dtype)

    def loaded(self, failure: BaseException | None) -> bytes:
        """Return whether each tensor was loaded, for ``agree_on_loaded``. Raises UsageError for one loaded in part."""
        return bytes(FAILED if failure is not None else shard.loaded() for shard in self._shards())

    def agree_on_loaded(self, flags: bytes, failure: BaseException | None) -> None:
        """Note which tensors were loaded, those without an element here too. Raises UsageError on all ranks.

        Raises ``failure``, if there is one, after the others have heard of it.
        """
        ranks = self.store.ranks
        every = (flags,) if ranks is None else ranks.comm_thread.agree(_WORD, flags or b"-").wait()
        if failure is not None:
            raise failure
        for shard, of_ranks in zip(self._shards(), zip(*every, strict=True), strict=False):
            if FAILED in of_ranks:
                raise UsageError(f"{_WORD}: the load of rank {of_ranks.index(FAILED)} has failed; nothing was changed")
            if {LOADED, NOT_LOADED} <= set(of_ranks):
                raise UsageError(
                    f"{_WORD}: {shard.name} was loaded on some ranks and not on others, and nothing was changed;"
                    " expected one torch.distributed.checkpoint.load by all ranks"
                )
            shard.is_loaded = NOT_LOADED not in of_ranks

    def check(self) -> None:
        """Raise UsageError for loaded values that do not fit; nothing was changed then."""
        if self._optimizer is not None:
            for segment, kinds in self._kept.items():
                self._check_state(self._optimizer, segment, kinds)
            steps = {segment.name: steps for segment, steps in self._steps.items()}
            self._groups = self._optimizer.reader(_WORD).groups(self.optimizer_state["param_groups"], self._ids, steps)

    def _check_state(self, optimizer: StateAccess, segment: Segment, kinds: Mapping[str, Shard]) -> None:
        """Raise UsageError for the loaded state of one parameter."""
        loaded = {kind for kind, shard in kinds.items() if shard.is_loaded}
        if not loaded:
            return
        missing = sorted(kinds.keys() - loaded - {"master"})
        weight, master = self._weights.get(segment), kinds.get("master")
        if missing:
            raise UsageError(
                f"{_WORD}: {segment.name} was loaded without {', '.join(missing)}, and nothing was changed; expected"
                " all of its state or nothing of it"
            )
        if weight is not None and optimizer.kept.has_master(segment) and not ({"master"} & loaded or weight.is_loaded):
            raise UsageError(
                f"{_WORD}: the state of {segment.name} was loaded without its master or the model's weight, and nothing"
                " was changed; expected one of them with it"
            )
        for moment in optimizer.rule.moments:
            if moment.is_positive and any(bool((values < 0).any()) for _, values in kinds[moment.name].parts()):
                raise UsageError(
                    f"{_WORD}: {moment.name} of {segment.name} has elements below zero, and nothing was changed;"
                    " expected a checkpoint of this optimizer's kind"
                )
        for part, values in master.parts() if master is not None and master.is_loaded else ():
            if not rounds_to(self._new_values(segment, part), values):
                raise UsageError(
                    f"{_WORD}: the masters loaded for {segment.name} are not those of its values, and nothing was"
                    " changed; load the model and the optimizer of the same checkpoint in one block"
                )

    def _new_values(self, segment: Segment, part: slice) -> torch.Tensor:
        """Return the values that a parameter of the optimizer will have, in memory order: (numel,)."""
        weight = self._weights.get(segment)
        if weight is None:
            found = self.model_state.get(self._names[segment], segment.parameter.detach())
            ordered = torch.empty_strided(segment.shape, segment.strides, dtype=segment.dtype, device="cpu")
            return ordered.copy_(found).as_strided((segment.numel,), (1,))[part]
        if weight.is_loaded:
            return weight.values(part).to(segment.dtype)
        return self._reader(segment)(range(part.start, part.stop))

    def apply(self) -> None:
        """Replace the store's values by those that were loaded; blocks."""
        lines = [f"{key}: {value!r}" for group in self._groups for key, value in group.items() if key != "params"]
        lines += [f"step of {segment.name}: {steps.item()}" for segment, steps in self._steps.items()]
        if self.store.ranks is not None:
            self.store.ranks.check_equal(_WORD, lines, "the same checkpoint loaded on all ranks")
        try:
            with torch.no_grad():
                for engine in self._engines:
                    engine.check_idle(_WORD)
                    engine.open_units.park_all()
                for segment, shard in self._weights.items():
                    if shard.is_loaded:
                        self._replace(segment, shard)
                plain = {full: self.model_state[name] for name, full in self._plain.items()}
                self._model.load_state_dict(plain, strict=False)
                if self._optimizer is not None:
                    self._optimizer.load_pieces(self._groups, self._states())
        except BaseException as error:
            for engine in self._engines:
                engine.phase.give_up(f"the values of {_WORD} were not all put into place: {error}")
            raise

    def _replace(self, segment: Segment, shard: Shard) -> None:
        """Replace the values of one parameter in this rank's shard, and its master."""
        first = segment.stretch.start
        if not segment.stretch:
            return
        with self.store.working_set.mark:
            with leased(self.store, segment.unit.keys[segment.span], "rw") as span:
                own = segment.piece(span)
                for part, values in shard.parts():
                    own[part.start - first : part.stop - first].copy_(values)
                del own, span
            segment.unit.engine.masters.fill_master(segment, shard.values)

    def _states(self) -> Iterator[tuple[Segment, int, dict[str, Callable[[slice], torch.Tensor]]]]:
        """Yield the loaded state of each parameter that has some: its step count, and values by slices of it."""
        for segment, kinds in self._kept.items():
            values: dict[str, Callable[[slice], torch.Tensor]]
            values = {kind: shard.values for kind, shard in kinds.items() if shard.is_loaded}
            weight = self._weights.get(segment)
            if "master" not in values and weight is not None and weight.is_loaded:
                values["master"] = weight.values
            if any(shard.is_loaded for shard in kinds.values()):
                yield segment, int(self._steps[segment]) if segment in self._steps else 1, values


def _plain_name(model: nn.Module, name: str) -> str:
    """Return ``name`` without the prefixes of wrappers, as torch's own ``get_state_dict`` has it."""
    if isinstance(model, DistributedDataParallel):
        name = name.removeprefix("module.")
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
