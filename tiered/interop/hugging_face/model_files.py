"""Models of transformers and PEFT from their files into a store, and back into files, a parameter at a time.

transformers builds the model on the meta device and decides what becomes of each tensor of the files, which it gets
deferred; the bytes are read when ``shard`` wants them. It decides in the same way which tensors are saved.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import find_adapter_config_file

from tiered.errors import TieredError, UsageError
from tiered.interop.checkpoint_folder import write_files
from tiered.store.store import Store
from tiered.zero.deferred_tensors import DeferredFiles, DeferredTensor, safetensors_files
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.shard import shard

__all__ = ["from_pretrained", "load_files", "saved_names", "write_adapters", "write_config"]

_SHARD = frozenset(inspect.signature(shard).parameters) - {"model", "store", "weights"}


def from_pretrained(
    model_class: Any, folder: str | Path, store: Store, *, frozen: bool | str = False, num_tokens: int | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Load the checkpoint in ``folder`` into ``store`` and return the model, sharded and ready to train; blocks.

    ``model_class`` is a class of transformers, such as ``AutoModelForCausalLM`` or ``GPT2LMHeadModel``. Files are read
    a parameter at a time, so neither they nor the model need fit memory. ``options``: those of ``tiered.shard``
    (``param_dtype``, ``unit``, ``hold``, ...), and any other for the class's own ``from_pretrained`` (``dtype``,
    ``attn_implementation``, ``num_labels``, ...), which decides names, dtypes, ties and conversions; a head that the
    files lack is drawn as there, and adapters of PEFT in ``folder``, beside a base or over one elsewhere, are added as
    there. In evaluation mode, as there: call ``model.train()``.

    ``frozen``: True for a base that no step changes, such as one under adapters. Its values are copied to the store, or
    read in its files where these are among the store's ``external`` and have them as they are needed. "in place"
    insists on that, so that nothing of the base is written: a parameter that would be copied is refused by name.

    ``num_tokens``: call ``model.resize_token_embeddings(num_tokens)``, with the embeddings in memory, before ``shard``.

    A store that holds a commit of this model gives its own values: of the files only names and shapes are read. Raises
    UsageError for a folder without safetensors files, names or shapes that do not fit, and a conversion that cannot be
    carried out tensor by tensor, by its name, before anything is written; and what ``tiered.shard`` raises.
    """
    if frozen not in (True, False, "in place"):
        raise ValueError(f'frozen={frozen!r}; expected True, False or "in place"')
    given = {name: options.pop(name) for name in list(options) if name in _SHARD}
    for name in ("device_map", "quantization_config", "state_dict", "config"):
        if options.get(name) is not None:
            raise UsageError(f"tiered.hf.from_pretrained({name}=); expected without it: {_REASONS[name]}")
    adapters = {name: options.pop(name) for name in ("adapter_name", "adapter_kwargs") if name in options}
    where = Path(folder).is_dir() and find_adapter_config_file(str(folder), **(adapters.get("adapter_kwargs") or {}))
    adapted, folder = folder, _base_of(Path(folder), Path(where)) if where else Path(folder)
    is_committed = store.durable and store.registered_state("tiered.model") is not None
    found = safetensors_files(folder, "tiered.hf.from_pretrained: ")
    paths = [path for path in found if not path.match("adapter_model*")]
    paths = paths or safetensors_files(folder / "model.safetensors", "the base of adapters: ")
    with closing(DeferredFiles(paths)) as files:
        model: Any = _build(model_class, folder, files.tensors(), options)
        if num_tokens is not None:
            _resize(model, num_tokens)
        weights = _take_values(model)
        if frozen:
            model.requires_grad_(False)
        if frozen == "in place" and not is_committed:
            _check_in_place(store, model, weights, given.get("param_dtype"))
        shard(model, store, weights=None if is_committed else weights, **given)
    if where:
        model.state_dict = lambda: {**dict(model.named_parameters()), **dict(model.named_buffers())}  # reads no value
        model.load_adapter(str(adapted), **adapters)
        del model.state_dict
    return model


_INSTEAD = "load it by its own from_pretrained inside `with tiered.construct(store):`"
_REASONS = {
    "device_map": "device= of tiered.shard says where the model computes",
    "quantization_config": "a quantised model has no parameters that train",
    "state_dict": "the values are those of the folder",
    "config": "the configuration is the folder's; single settings are arguments",
}


def _build(model_class: Any, folder: Path, tensors: Mapping[str, DeferredTensor], options: dict[str, Any]) -> Any:
    """Return the model that transformers makes of ``tensors``, with deferred parameters."""
    names = {name: options.pop(name) for name in ("trust_remote_code", "code_revision") if name in options}
    config, options = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **names, **options)
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(f"{folder} holds a quantised model, whose parameters do not train; expected one that is not")
    settings = {name: options.pop(name) for name in ("attn_implementation",) if name in options}
    if not hasattr(model_class, "config_class"):
        with torch.device("meta"):
            model_class = type(model_class.from_config(config, **names, **settings))
    with refusing_by_name("tiered.hf.from_pretrained", _INSTEAD):
        model = model_class.from_pretrained(None, config=config, state_dict=dict(tensors), **settings, **options)
    model.config._name_or_path = model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _resize(model: Any, num_tokens: int) -> None:
    """Have ``model`` resize its embeddings, with their values read; parameters that are tied stay so."""
    both = torch.nn.ModuleList(filter(None, (model.get_input_embeddings(), model.get_output_embeddings())))
    read = {p: torch.nn.Parameter(p.values()) for p in both.parameters() if isinstance(p, DeferredTensor)}
    for module in model.modules():
        module._parameters |= {name: read[p] for name, p in module._parameters.items() if p in read}
    model.resize_token_embeddings(num_tokens)


def _base_of(folder: Path, adapter_config: Path) -> Path:
    """Return the folder of the base that the adapters in ``folder`` are for. Raises UsageError where none is here."""
    if (folder / "config.json").is_file():
        return folder
    base = json.loads(adapter_config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base and Path(base).is_dir():
        return Path(base)
    raise UsageError(
        f"{folder} has adapters alone, and their base is {base!r}, which is no folder here; expected"
        f" model = tiered.hf.from_pretrained(CLASS, BASE_FOLDER, store), then model.load_adapter({str(folder)!r})"
    )


def _take_values(model: Any) -> dict[str, torch.Tensor]:
    """Return the values of the parameters and persistent buffers of ``model``; buffers that were deferred are read."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.values()
    state = model.state_dict()  # what the files have, and what transformers drew, by every name
    values = dict(model.named_parameters())
    return values | {name: buffer for name, buffer in model.named_buffers() if name in state}


def _check_in_place(
    store: Store, model: Any, weights: Mapping[str, torch.Tensor], param_dtype: torch.dtype | None
) -> None:
    """Raise UsageError for a parameter that cannot be read from the files as it is needed."""
    for name, parameter in model.named_parameters():
        values = weights[name]
        place = values.place if isinstance(values, DeferredTensor) else None
        if place is None:
            kind = (
                "is computed from tensors of the files, by a cast or a conversion"
                if values.is_meta
                else "is not in the files"
            )
            raise _not_in_place(name, kind)
        entry = store.external.find(*place)
        dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
        if getattr(torch, entry.dtype) != dtype:
            raise _not_in_place(name, f"is {entry.dtype} there, and {dtype} was asked for")


def _not_in_place(name: str, reason: str) -> UsageError:
    return UsageError(
        f'tiered.hf.from_pretrained(frozen="in place"): {name} {reason}; expected frozen=True, which copies the base to'
        " the store"
    )


def saved_names(model: Any, state: dict[str, Any], *, original_format: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that the model's own ``save_pretrained`` would write, deferred as those of ``state`` are.

    Raises UsageError for a conversion that cannot be undone tensor by tensor.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    kept = remove_tied_weights_from_state_dict(kept, model)
    if original_format:
        with refusing_by_name("tiered.save_pretrained", "original_format=False"):
            kept = dict(revert_weight_conversion(model, kept))
    return kept


def write_config(model: Any, dtype: torch.dtype | None, folder: Path) -> None:
    """Write what stands beside the weights: config.json, generation_config.json, and the code of a custom model."""
    model.config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def write_adapters(model: Any, folder: Path, state: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None) -> None:
    """Have PEFT save the adapters of ``model`` to ``folder``; the base is not read.

    PEFT picks the tensors by name; those alone get values, all of them at once.
    """
    wanted: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        tensor = state[name]
        wanted[name] = tensor.values() if isinstance(tensor, DeferredTensor) else tensor
        return wanted[name]

    watched = {name: DeferredTensor.of(tensor, partial(read, name)) for name, tensor in state.items()}
    for picked in _picked(model, watched):
        picked.values()
    given = {name: (tensor.to(dtype) if dtype else tensor).detach().clone() for name, tensor in wanted.items()}
    write_files(folder, lambda temporary: model.save_pretrained(temporary, state_dict={**watched, **given}))


def _picked(model: Any, state: dict[str, DeferredTensor]) -> list[DeferredTensor]:
    """Return the tensors of ``state`` that PEFT saves."""
    if isinstance(model, PreTrainedModel):
        return list(model.get_adapter_state_dict(state_dict=state).values())
    from peft import get_peft_model_state_dict

    found: list[DeferredTensor] = []
    for name in model.peft_config:
        found += get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name).values()
    return found


def load_files(model: nn.Module, folder: Path) -> None:
    """Load the safetensors files in ``folder``, by the names of ``model.state_dict()``, a unit at a time.

    Raises UsageError for a folder without all of them, and for names that the model does not have.
    """
    units = {name: _unit_name(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for path in safetensors_files(folder, "the best step's weights: "):
        with safe_open(path, framework="pt") as file:
            groups: dict[str, list[str]] = {}
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                groups.setdefault(units.get(name, ""), []).append(name)
            for group in groups.values():
                found = model.load_state_dict({name: file.get_tensor(name) for name in group}, strict=False)
                if found.unexpected_keys:
                    raise UsageError(f"{path} has {found.unexpected_keys[0]!r}, which the model does not have")


def _unit_name(parameter: nn.Parameter) -> str:
    return str(parameter.segment.unit.name) if isinstance(parameter, TieredParameter) else ""


@contextmanager
def refusing_by_name(what: str, next_step: str) -> Iterator[None]:
    """Turn an error of a conversion in this block into a UsageError that names the conversion."""
    try:
        yield
    except Exception as error:
        name = _name_of_conversion(error)
        if not name:
            raise
        reason = str(error) if isinstance(error, TieredError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{what}: {name} of transformers cannot be carried out tensor by tensor ({reason}); {next_step}"
        ) from error


def _name_of_conversion(error: BaseException) -> str:
    """Return the conversion in which ``error`` was raised, and the names that it is about; "" for another error."""
    names: dict[str, None] = {}
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, ConversionOps):
            names[type(owner).__name__] = None
        loading = trace.tb_frame.f_locals.get("loading_info")
        for text in getattr(loading, "conversion_errors", {}).values():  # transformers has kept the error's text alone
            names[text.rpartition("Error: ")[2].partition(". ")[0]] = None
        if isinstance(owner, WeightConverter):
            names[f"{' + '.join(owner.source_patterns)} -> {' + '.join(owner.target_patterns)}"] = None
        trace = trace.tb_next
    return " ".join(reversed(names))
