"""The small state of a sharded model that rides along with a commit, and the model's state_dict / load_state_dict.

The parameters themselves are keys of the store; here are the buffers, the description that a resumed store must agree
with, and the random number generators. ModelValues reads the tensors of a ``state_dict()`` one at a time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tiered.bytes.file_stream import FileMemory
from tiered.errors import CapacityError, UsageError
from tiered.store.store import Store
from tiered.units import format_bytes
from tiered.zero.compute_device import accelerator_type, generator_states, set_generator_states
from tiered.zero.engine import Engine
from tiered.zero.parameters.module_calls import num_on_stack
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives
from tiered.zero.state_dict_copies import memory_for_copies

__all__ = [
    "ModelState",
    "ModelValues",
    "RandomState",
    "check_added",
    "gather_for_others",
    "hook_state_dicts",
    "opened",
    "refuse_missing",
]


MAX_ADDED_NBYTES = 64 << 20
"""Most bytes of parameters added after ``shard``: each commit's text holds 4/3 of them, and memory holds them."""


class ModelState:
    """The description of a model's units, and the model's tensors in ordinary memory, by name.

    These are the buffers, by the names they had at ``shard``, and additions to the model since, such as adapters:
    parameters that are not sharded, and their buffers.

    ``laid_out`` is called when ``load_state_dict`` has found the units laid out otherwise.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], laid_out: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self._units = units
        self._laid_out = laid_out
        self._description = {unit.name: [segment.descriptor() for segment in unit.segments] for unit in units}
        self._tied = _tied_names(model)
        self._persistent = _persistent_names(model)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for full, _ in model.named_buffers():
            prefix, _, name = full.rpartition(".")
            self._places[full] = (model.get_submodule(prefix), name)

    def state_dict(self) -> dict[str, Any]:
        """Return the description and copies of the tensors in ordinary memory, buffers persistent or not.

        Raises CapacityError for more added parameters than a commit carries.
        """
        added = self._added()
        check_added(tensor for tensor in added.values() if isinstance(tensor, nn.Parameter))
        return {
            "units": self._description,
            "world": self._units[0].world,
            "class": type(self.model).__name__,
            "tied": self._tied,
            "persistent": self._persistent,
            "files": _small_files(self.model),
            "trained": {unit.name: [s.name for s in unit.segments if s.trainable] for unit in self._units},
            "trained_first": {unit.name: [s.name for s in unit.segments if s.was_trainable] for unit in self._units},
            "buffers": _copies(self._buffers()),
            "added": _copies(added),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the values back; raises UsageError with the differences when the state is another model's."""
        self.compare(state, with_added=True)
        self.adopt_layout(state)
        with torch.no_grad():
            for name, tensor in self._buffers().items():
                tensor.copy_(state["buffers"][name])
            for name, tensor in self._added().items():
                tensor.copy_(state["added"][name])

    def adopt_layout(self, state: dict[str, Any]) -> None:
        """Have the units lie as they did when ``state`` was committed; they must be parked.

        Raises UsageError for a state that was committed over another number of ranks: the shards are others.
        """
        world = state.get("world", 1)  # an earlier release knew one rank alone
        if world != self._units[0].world:
            raise UsageError(
                f"the store holds one rank's shards of this model over {world} ranks, and there are"
                f" {self._units[0].world}; expected as many ranks as committed it"
            )
        for unit in self._units:
            first = set(state["trained_first"][unit.name])
            for segment in unit.segments:
                segment.was_trainable = segment.name in first
            layout = unit.layout.with_trainable(state["trained"][unit.name])
            if layout != unit.layout:
                unit.place(layout)
        self._laid_out()

    def compare(self, state: Any, *, with_added: bool = False) -> None:
        """Raise UsageError with the differences between the committed model ``state`` and this one.

        ``with_added``: all additions to the model are there by now, and count.
        """
        if "trained" not in state:
            raise UsageError(
                "the store holds this model as an older version of tiered laid it out; expected that version, or"
                " model.state_dict() of it loaded into a new store"
            )
        theirs = _parameters_in_words(state["units"]) | _tensors_in_words("buffer", state["buffers"])
        mine = _parameters_in_words(self._description) | _tensors_in_words("buffer", self._buffers())
        if with_added:
            what = "added after tiered.shard:"
            theirs |= _tensors_in_words(what, state.get("added", {}), with_dtype=True)
            mine |= _tensors_in_words(what, self._added(), with_dtype=True)
        differences = [
            f"{name}: the store has {theirs.get(name, 'none')}, this model {mine.get(name, 'none')}"
            for name in {**mine, **theirs}
            if theirs.get(name) != mine.get(name)
        ]
        if differences:
            more = f"; and {len(differences) - 6} more" if len(differences) > 6 else ""
            raise UsageError(
                f"the store holds another model: {'; '.join(differences[:6])}{more}; expected the same model, the same"
                " unit= and param_dtype=; a changed model begins in another directory, with the values of `tiered"
                " export RUN FOLDER` by its own names as weights="
            )

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = {name: module._buffers.get(attribute) for name, (module, attribute) in self._places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _added(self) -> dict[str, torch.Tensor]:
        known = {id(buffer) for buffer in self._buffers().values()}
        added: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not isinstance(parameter, TieredParameter)
        }
        return added | {name: buffer for name, buffer in self.model.named_buffers() if id(buffer) not in known}


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return the other names of parameters that have several, and the first of each."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def _persistent_names(model: nn.Module) -> list[str]:
    """Return the names of the buffers that a state_dict() has."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _small_files(model: nn.Module) -> dict[str, str]:
    """Return the texts of a Hugging Face model's configuration, by the names of its files; {} for another model."""
    if hasattr(model, "peft_config"):
        return {}  # the configuration is its base's, whose names differ
    attributes = {"config.json": "config", "generation_config.json": "generation_config"}
    found: dict[str, Any] = {name: getattr(model, attribute, None) for name, attribute in attributes.items()}
    return {name: each.to_json_string() for name, each in found.items() if hasattr(each, "to_json_string")}


def check_added(parameters: Iterable[torch.Tensor]) -> None:
    """Raise CapacityError for more parameters beside the sharded ones than should ride along with each commit."""
    nbytes = sum(parameter.nbytes for parameter in parameters)
    if nbytes > MAX_ADDED_NBYTES:
        raise CapacityError(
            f"parameters that are not sharded take {format_bytes(nbytes)} of each commit; expected at most"
            f" {format_bytes(MAX_ADDED_NBYTES)}: add them to the model before tiered.shard, which moves them into the"
            " store, or train with durable=False"
        )


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _parameters_in_words(units: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, str]:
    return {
        f"parameter {each['name']} of unit {unit!r}": (
            f"{tuple(each['shape'])} {each['dtype']} strides {tuple(each['strides'])}"
        )
        for unit, segments in units.items()
        for each in segments
    }


def _tensors_in_words(what: str, tensors: Mapping[str, torch.Tensor], *, with_dtype: bool = False) -> dict[str, str]:
    return {
        f"{what} {name}": f"{tuple(tensor.shape)} {tensor.dtype if with_dtype else ''}".strip()
        for name, tensor in tensors.items()
    }


def refuse_missing(store: Store, keys: Iterable[str]) -> None:
    """Raise UsageError for a store that lacks some of its committed ``keys``, as after `tiered verify --drop`."""
    missing = [key for key in keys if key not in store]
    if missing:
        raise UsageError(
            f"the store holds this model without {', '.join(map(repr, missing[:5]))}{', ...' * (len(missing) > 5)}: "
            "dropped or deleted since it was trained; restore the directories from a copy, or start anew"
        )


class RandomState:
    """The random number generators of torch (the CPU's and the accelerators'), numpy and python."""

    def state_dict(self) -> dict[str, Any]:
        """Return all states."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        version, words, next_gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "accelerators": {accelerator_type(): generator_states()},
            "numpy": (str(name), keys, int(position), int(has_gauss), float(gauss)),
            "python": (version, np.array(words, dtype=np.uint32), next_gauss),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set all generators to the states that ``state_dict`` returned."""
        torch.set_rng_state(state["torch"])
        states = state.get("accelerators") or {"cuda": state.get("cuda", [])}  # an earlier release knew no others
        set_generator_states(states.get(accelerator_type(), []))
        name, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        version, words, next_gauss = state["python"]
        random.setstate((version, tuple(np.asarray(words).tolist()), next_gauss))


def hook_state_dicts(model: nn.Module, engine: Engine) -> None:
    """Make ``state_dict`` copy and ``load_state_dict`` write parameters, of the model and of each of its modules."""
    comm = engine.units[0].comm

    def begin_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        calls, memory = engine.phase.state_dicts, None
        if calls.num_calls and num_on_stack(nn.Module.state_dict.__code__) == 1:
            calls.end()  # one before this failed in the middle, in a hook of the caller's say
        if not calls.num_calls:
            engine.check_idle("state_dict()")
            memory = None if calls.only_looks or calls.only_gathers else _memory_for(module, engine)
        calls.enter(memory)

    def end_state_dict(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        engine.phase.state_dicts.leave()
        if not engine.phase.state_dicts.num_calls:
            engine.open_units.park_all()
            if isinstance(comm, UnitCollectives):  # each rank has buffers of its own, such as those of batch norm
                names = [name for name in (f"{prefix}{own}" for own in _persistent_names(module)) if name in state]
                state.update(zip(names, comm.of_first([state[name] for name in names]), strict=True))

    def begin_load(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would take the parameters out of the store; expected assign=False"
            )
        if torch.__future__.get_swap_module_params_on_conversion():
            raise UsageError(
                "load_state_dict() by swapping tensors would take the parameters out of the store; expected"
                " torch.__future__.set_swap_module_params_on_conversion(False)"
            )
        if not prefix:  # the module that it was called on; one before this may have failed in the middle
            engine.check_idle("load_state_dict()")
            if isinstance(comm, UnitCollectives):
                comm.check_values("load_state_dict()", state)
            engine.phase.num_loading = 0
        engine.phase.num_loading += 1

    def end_load(module: nn.Module, incompatible: Any) -> None:
        engine.phase.num_loading -= 1
        if engine.phase.num_loading == 0:
            engine.open_units.park_all()

    for module in model.modules():
        module.register_state_dict_pre_hook(begin_state_dict)  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(end_state_dict)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(begin_load)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(end_load)  # type: ignore[no-untyped-call]


def gather_for_others(model: nn.Module, engines: Iterable[Engine]) -> None:
    """Take part in the ``model.state_dict()`` of other ranks, which have called it; nothing of it is kept here. Blocks.

    ``engines`` are those of the model's units. Raises what ``state_dict()`` does.
    """
    calls = [engine.phase.state_dicts for engine in engines]
    for each in calls:
        each.only_gathers = True
    try:
        model.state_dict()
    finally:
        for each in calls:
            each.only_gathers = False


def _memory_for(module: nn.Module, engine: Engine) -> FileMemory | None:
    """Return where the copies of the parameters of ``module`` go. Raises CapacityError where there is no room."""
    segments = dict.fromkeys(p.segment for p in module.parameters() if isinstance(p, TieredParameter))
    devices = engine.working_set.space.devices
    next_step = (
        "call state_dict() of one unit at a time, or save what streams: tiered.save_pretrained(model, folder), or after"
        " a commit `tiered export RUN FOLDER`"
    )
    return memory_for_copies(devices, [segment.nbytes for segment in segments], "state_dict()", next_step)


# -- model values ------------------------------------------------------------------------------------------------------


class ModelValues:
    """``state`` is what ``model.state_dict()`` gives, with a meta tensor for each sharded parameter.

    Names of one tied parameter have meta tensors of one storage. Between steps only.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        """``what`` names the caller in messages. Reads no parameter. Raises UsageError at the wrong time."""
        parameters = [p for p in model.parameters() if isinstance(p, TieredParameter)]
        segments: list[Segment] = [p.segment for p in parameters if isinstance(p.segment.unit, Unit)]
        self._segments = {segment.layout().untyped_storage()._cdata: segment for segment in segments}
        self.engines: list[Engine] = list(dict.fromkeys(segment.unit.engine for segment in segments))
        units = list(dict.fromkeys(segment.unit for segment in segments))
        self._next = dict(itertools.pairwise(units))
        for engine in self.engines:
            engine.check_idle(what)
            engine.phase.state_dicts.only_looks = True
        try:
            self.state: dict[str, Any] = dict(model.state_dict())
        finally:
            for engine in self.engines:
                engine.phase.state_dicts.only_looks = False

    def segment_of(self, tensor: torch.Tensor) -> Segment | None:
        """Return the parameter that ``tensor`` of ``state`` stands for, None for a tensor that has its values."""
        return self._segments.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def read(self, segment: Segment) -> torch.Tensor:
        """Return the values of a parameter in DRAM, with its shape and strides: the store's own bytes, to be read.

        They stay as long as the tensor lives, and take room of the budget meanwhile.
        """
        with segment.unit.working_set.mark:
            unit = segment.unit
            is_first = not unit.is_open
            span = unit.open("r")[segment.span]
            if is_first and unit in self._next:
                unit.working_set.prefetch(self._next[unit].keys)
            unit.buffer.use()
            return segment.view(span).detach().cpu()


@contextmanager
def opened(model: nn.Module, what: str) -> Iterator[ModelValues]:
    """Lend the values of ``model``; its units are parked afterwards."""
    values = ModelValues(model, what)
    try:
        yield values
    finally:
        for engine in values.engines:
            engine.open_units.park_all()
