"""Weights: the sources of a model's initial values: its own parameters, a state dict, or safetensors files.

They are read one parameter at a time, so that a model larger than memory can be filled.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tiered.errors import CorruptionError, UsageError
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment

__all__ = ["Weights"]


class Weights:
    """Initial values by parameter name. With a source, every parameter and persistent buffer must be in it.

    Parameters on the meta device are replaced by empty ones on the CPU (new objects, ties kept): they need a source, or
    a store that has the values, ``is_committed``, and gives those of buffers when it is resumed.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Mapping[str, torch.Tensor] | str | Path | Sequence[str | Path] | None,
        *,
        is_committed: bool = False,
    ) -> None:
        self._mapping: Mapping[str, torch.Tensor] | None = source if isinstance(source, Mapping) else None
        self._files: dict[str, Any] = {}
        self._paths: dict[str, str] = {}  # by the name of a tensor
        if source is not None and self._mapping is None:
            for path in _paths([source] if isinstance(source, str | Path) else list(source)):
                reader = _open(path)
                self._files |= dict.fromkeys(reader.keys(), reader)
                self._paths |= dict.fromkeys(reader.keys(), str(path))
        self._dtypes: dict[Segment, bool] = {}
        self._has_source = source is not None
        if self._has_source:
            self._check(model)
            self._load_buffers(model)
        if is_committed:
            _leave_buffers_on_meta(model)
        self._leave_meta(model, is_committed=is_committed)

    def is_cast(self, segment: Segment) -> bool:
        """Return whether ``segment``'s values lose bits on their way into the unit, so that it needs a master."""
        if segment.dtype != torch.bfloat16 or not segment.trainable:
            return False
        return self._dtype(segment) != segment.dtype

    def constructed(self, segments: Iterable[Segment]) -> dict[Segment, Any] | None:
        """Return the places where a constructor made the values of ``segments``, if these are their fp32 masters."""
        found: dict[Segment, Any] = {}
        for segment in segments:
            parameter = segment.parameter
            if self._has_source or not isinstance(parameter, TieredParameter) or parameter.dtype != torch.float32:
                return None
            found[segment] = parameter.segment.unit
            if parameter.segment.strides != segment.strides:
                return None
        return found

    def place(self, segment: Segment) -> tuple[str, str] | None:
        """Return the file that has the values of ``segment`` as they lie in memory, and their name there; else None."""
        path = self._paths.get(segment.name)
        if path is None or segment.strides != torch.empty(segment.shape, dtype=segment.dtype, device="meta").stride():
            return None
        return path, segment.name

    def copy(self, segment: Segment, out: torch.Tensor) -> None:
        """Copy the values of ``segment``'s parameter to ``out`` (its shape, any dtype)."""
        with torch.no_grad():
            if self._has_source:
                out.copy_(self._get(segment.name))
                return
            parameter = segment.parameter
            if isinstance(parameter, TieredParameter):
                constructed: Any = parameter.segment.unit
                with constructed.lend("r") as value:  # not "rw": clean bytes are not written again
                    out.copy_(value)
                    del value
            else:
                out.copy_(parameter)

    def _dtype(self, segment: Segment) -> torch.dtype:
        if self._mapping is not None:
            return self._mapping[segment.name].dtype
        if segment.name in self._files:
            name: str = self._files[segment.name].get_slice(segment.name).get_dtype()
            return torch.bfloat16 if name == "BF16" else torch.float32
        return segment.parameter.dtype

    def _get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._mapping[name] if self._mapping is not None else self._files[name].get_tensor(name)
        return tensor.detach()

    def _shape(self, name: str) -> tuple[int, ...]:
        if self._mapping is not None:
            return tuple(self._mapping[name].shape)
        return tuple(self._files[name].get_slice(name).get_shape())

    def _check(self, model: nn.Module) -> None:
        known = set(self._mapping if self._mapping is not None else self._files)
        wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
        wanted |= {name: tuple(b.shape) for name, b in _persistent_buffers(model).items()}
        every = set(wanted) | {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing = sorted(set(wanted) - known)
        problems = [f"missing {name}{_suggest(name, known)}" for name in missing]
        problems += [f"unexpected {name}{_suggest(name, missing)}" for name in sorted(known - every)]
        problems += [
            f"{name} has shape {self._shape(name)}, the model expects {shape}"
            for name, shape in wanted.items()
            if name in known and self._shape(name) != shape
        ]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise UsageError(
                f"weights= does not fit the model: {'; '.join(problems[:8])}{more}; expected its names and shapes: tie"
                " what is one, pass a mapping with the model's names, or have a loader that converts them run inside"
                " `with tiered.construct(store):`"
            )

    def _load_buffers(self, model: nn.Module) -> None:
        for name, buffer in _persistent_buffers(model).items():
            parent = model.get_submodule(name.rpartition(".")[0])
            value = self._get(name).to(buffer.dtype).clone()
            parent._buffers[name.rpartition(".")[2]] = value

    def _leave_meta(self, model: nn.Module, *, is_committed: bool) -> None:
        replaced: dict[int, nn.Parameter] = {}
        for module_name, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    raise UsageError(
                        f"buffer {_full(module_name, name)} is on the meta device, and weights= have no values for it;"
                        " expected them: build the model (or load it, by from_pretrained) inside"
                        " `with tiered.construct(store):` instead of on the meta device, or assign the buffer"
                    )
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if not self._has_source and not is_committed:
                    raise UsageError(
                        f"parameter {_full(module_name, name)} is on the meta device; expected weights= for its values,"
                        " or a store that has committed this model"
                    )
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = nn.Parameter(_blank(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = replaced[id(parameter)]


def _blank(parameter: nn.Parameter) -> torch.Tensor:
    """Return an empty tensor like ``parameter`` that takes no memory, or none until it is touched."""
    if parameter.numel() > 1 and parameter.is_contiguous():
        return torch.empty((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")


def _leave_buffers_on_meta(model: nn.Module) -> None:
    """Put buffers of zeros into the place of those on the meta device; ties are kept."""
    replaced: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = replaced.setdefault(id(buffer), torch.zeros_like(buffer, device="cpu"))


def _full(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[_full(module_name, name)] = buffer
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CorruptionError(f"weights= {path} is not a safetensors file: {error}", file=str(path)) from error


def _paths(sources: list[str | Path]) -> list[Path]:
    paths: list[Path] = []
    for source in map(Path, sources):
        found = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        if not found or not all(path.is_file() for path in found):
            raise UsageError(f"weights={str(source)!r}: no safetensors file there; expected files or a folder of them")
        paths += found
    return paths


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (is it {close[0]}?)" if close else ""
