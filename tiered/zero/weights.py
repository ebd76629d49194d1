"""Weights: the sources of a model's initial values: its own parameters, a state dict, or safetensors files.

They are read one parameter at a time, so that a model larger than memory can be filled. Frozen spans can stay in the
safetensors files that the model is loaded from.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tiered.bytes.host_tensor import copy_across
from tiered.errors import UsageError
from tiered.store.format.row import ExternalRange, Spec
from tiered.store.store import Store
from tiered.units import format_bytes
from tiered.zero.deferred_tensors import DeferredFiles, DeferredTensor, safetensors_files
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment, Unit, digest

__all__ = ["Weights", "find_in_place"]


class Weights:
    """Initial values by parameter name. With a source, every parameter and persistent buffer must be in it.

    Parameters on the meta device are replaced by empty ones on the CPU (new objects, ties kept): they need a source, or
    a store that has the values, ``is_committed``, and gives those of buffers when it is resumed. Two of them whose
    values the source has once, and that the model's own ``tie_weights()`` ties, become one. ``close`` it.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Mapping[str, Any] | str | Path | Sequence[str | Path] | None,
        *,
        is_committed: bool = False,
    ) -> None:
        self._files: DeferredFiles | None = None
        self._values: Mapping[str, Any] = source if isinstance(source, Mapping) else {}
        self._has_source = source is not None
        if self._has_source and not isinstance(source, Mapping):
            sources = [source] if isinstance(source, str | Path) else list(source)  # type: ignore[arg-type]
            paths = chain.from_iterable(safetensors_files(each, "weights=") for each in sources)
            self._files = DeferredFiles(list(paths))
            self._values = self._files.tensors()
        if self._has_source:
            self._tie(model)
            self._check(model)
            try:
                self._load_buffers(model)
            finally:
                self.close()  # until the values are copied
        _compute_buffers(model)
        if is_committed:
            _leave_buffers_on_meta(model)
        self._leave_meta(model, is_committed=is_committed)

    def close(self) -> None:
        """Close the file that is open, until the next value is copied. Idempotent."""
        if self._files is not None:
            self._files.close()

    def is_cast(self, segment: Segment) -> bool:
        """Return whether ``segment``'s values lose bits on their way into the unit, so that it needs a master."""
        if segment.dtype != torch.bfloat16 or not segment.trainable:
            return False
        return self._dtype(segment) != segment.dtype

    def place(self, segment: Segment) -> tuple[str, str] | None:
        """Return the file that has the values of ``segment`` as they lie in memory, and their name there; else None."""
        values = self._values.get(segment.name)
        return values.place if isinstance(values, DeferredTensor) and _is_in_order(segment) else None

    def begin_copy_piece(self, segment: Segment, out: torch.Tensor) -> Callable[[], None] | None:
        """Start to copy the values of ``segment.stretch`` to ``out``, (len(stretch),) in memory order, of any dtype.

        Returns the call that waits, if any. Of a file no more is read. Where the ranks have constructed the values,
        all of them take part, for an empty stretch, too.
        """
        constructed = self._constructed(segment)
        if constructed is not None and constructed.is_divided:
            if segment.numel:
                with constructed.lend("r") as value, torch.no_grad():
                    out.copy_(value.as_strided((segment.numel,), (1,))[segment.stretch.start : segment.stretch.stop])
                    del value
            return None
        if not segment.stretch:
            return None
        if len(segment.stretch) == segment.numel:
            return self._begin_copy(segment, out.as_strided(segment.shape, segment.strides))
        first, values = segment.stretch.start, self._values.get(segment.name)
        if isinstance(values, DeferredTensor) and _is_in_order(segment):
            values.copy_part(first, out)
        else:
            whole = torch.empty_strided(segment.shape, segment.strides, dtype=out.dtype, device="cpu")
            self.copy(segment, whole)
            out.copy_(whole.as_strided((segment.numel,), (1,))[first : segment.stretch.stop])
        return None

    def digest(self, segment: Segment) -> str:
        """Return a digest of the values of ``segment``'s parameter, in words; of those in a file their looks."""
        value = self._values.get(segment.name)
        if isinstance(value, DeferredTensor):
            return f"{value.dtype} in a file"
        constructed = self._constructed(segment)
        if constructed is not None and constructed.is_divided:
            return f"{segment.parameter.dtype} constructed with the digest {constructed.digest:016x}"
        looks = value if isinstance(value, torch.Tensor) else segment.parameter
        copied = torch.empty(segment.shape, dtype=looks.dtype, device="cpu")
        self.copy(segment, copied)
        return f"{copied.dtype} with the digest {digest(copied.view(-1)):016x}"

    def _begin_copy(self, segment: Segment, out: torch.Tensor) -> Callable[[], None] | None:
        """Start to copy the values of ``segment``'s parameter to ``out``; return the call that waits, if any."""
        values = self._values.get(segment.name)
        if isinstance(values, DeferredTensor):
            return values.begin_copy(out)
        self.copy(segment, out)
        return None

    def copy(self, segment: Segment, out: torch.Tensor) -> None:
        """Copy the values of ``segment``'s parameter to ``out`` (its shape, any dtype)."""
        with torch.no_grad():
            if self._has_source:
                copy_across(out, self._get(segment.name))
                return
            constructed = self._constructed(segment)
            if constructed is not None:
                with constructed.lend("r") as value:  # not "rw": clean bytes are not written again
                    out.copy_(value)
                    del value
            else:
                copy_across(out, segment.parameter)

    def _constructed(self, segment: Segment) -> Any:
        """Return the ConstructedParameter that has the values of ``segment``, if one does."""
        parameter = segment.parameter
        return parameter.segment.unit if isinstance(parameter, TieredParameter) and not self._has_source else None

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self._get(segment.name).dtype if self._has_source else segment.parameter.dtype

    def _get(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` of the source, or one over the memory of its array. Raises TypeError."""
        value = self._values[name]
        try:
            if isinstance(value, np.ndarray):
                with warnings.catch_warnings(action="ignore"):  # of an array that is only for reading
                    value = torch.from_numpy(np.asarray(value, value.dtype.newbyteorder("="), order="C"))
            return value.detach()  # type: ignore[no-any-return]
        except (AttributeError, TypeError) as error:
            raise TypeError(f"weights= has {type(value).__name__} for {name}; expected a tensor of numbers") from error

    def _tie(self, model: nn.Module) -> None:
        """Have the model tie its weights where the source lacks one on meta: a model built empty has lost its ties."""
        tie_weights = getattr(model, "tie_weights", None)
        is_lacking = any(p.is_meta and name not in self._values for name, p in model.named_parameters())
        if is_lacking and callable(tie_weights):
            tie_weights()

    def _check(self, model: nn.Module) -> None:
        known = set(self._values)
        tensors = {**dict(model.named_parameters()), **_persistent_buffers(model)}
        wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        every = set(wanted) | {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing, unexpected = sorted(set(wanted) - known), sorted(known - every)
        problems = [f"missing {name}{_suggest(name, unexpected)}" for name in missing]
        problems += [f"unexpected {name}{_suggest(name, missing)}" for name in unexpected]
        problems += [
            f"{name} has shape {tuple(self._get(name).shape)}, the model expects {shape}"
            for name, shape in wanted.items()
            if name in known and tuple(self._get(name).shape) != shape
        ]
        real = sorted(name for name, tensor in tensors.items() if name in known and not tensor.dtype.is_complex)
        problems += [f"{name} is complex, and real in the model" for name in real if self._get(name).is_complex()]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise UsageError(
                f"weights= does not fit the model: {'; '.join(problems[:8])}{more}; expected its names and shapes: tie"
                " what is one, pass a mapping with the model's names, or load a checkpoint of transformers by"
                " tiered.hf.from_pretrained, which converts it"
            )

    def _load_buffers(self, model: nn.Module) -> None:
        for name, buffer in _persistent_buffers(model).items():
            parent = model.get_submodule(name.rpartition(".")[0])
            value = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            parent._buffers[name.rpartition(".")[2]] = value.copy_(self._get(name))

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


def _is_in_order(segment: Segment) -> bool:
    """Return whether the values lie in memory as those of a contiguous tensor do."""
    return segment.strides == torch.empty(segment.shape, dtype=segment.dtype, device="meta").stride()


def _blank(parameter: nn.Parameter) -> torch.Tensor:
    """Return an empty tensor like ``parameter`` that takes no memory, or none until it is touched."""
    if parameter.numel() > 1 and parameter.is_contiguous():
        return torch.empty((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")


def _compute_buffers(model: nn.Module) -> None:
    """Compute non-persistent buffers on meta, such as rotary frequencies, by a second construction of the model.

    Models of transformers can be constructed again. A buffer keeps the dtype of its computation, as in from_pretrained.
    """
    for module in model.modules():
        if not hasattr(type(module), "config_class") or not any(buffer.is_meta for buffer in module.buffers()):
            continue
        hook = register_module_parameter_registration_hook(
            lambda *args: None if args[-1] is None else nn.Parameter(args[-1].to("meta"), False)  # type: ignore[arg-type]
        )
        with hook, torch.device("cpu"), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
            computed = dict(type(module)(module.config).named_buffers(remove_duplicate=False))
            for prefix, child in module.named_modules():
                for name in child._non_persistent_buffers_set:
                    if (buffer := child._buffers[name]) is not None and buffer.is_meta:
                        child._buffers[name] = computed.get(_full(prefix, name), buffer)


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


def _suggest(name: str, others: Iterable[str]) -> str:
    """Return a hint at the likely one of ``others``, which nothing else fits: it has the numbers of ``name``, too."""
    numbers = re.findall(r"\d+", name)
    close = difflib.get_close_matches(name, [each for each in others if re.findall(r"\d+", each) == numbers], n=1)
    return f" (is it {close[0]}?)" if close else ""


# -- in place ----------------------------------------------------------------------------------------------------------


_log = logging.getLogger("tiered")


def find_in_place(store: Store, units: Sequence[Unit], source: Weights) -> dict[str, tuple[Spec, list[ExternalRange]]]:
    """Return the keys of frozen spans whose bytes lie in the files of ``source``, and where; for ``adopt``.

    A span stays there where the store has its files open, in its ``external``, and they have all of its values with
    the same dtype and in the same order. One line of the log says how much is to be copied although its file is open.
    """
    found: dict[str, tuple[Spec, list[ExternalRange]]] = {}
    left: list[str] = []
    copied = 0
    for unit in units if store.external.paths else ():
        for number, span in enumerate(unit.layout.spans):
            segments = [segment for segment in unit.segments if segment.span == number]
            if span.trainable or not segments:
                continue
            ranges = _ranges(store, segments, source)
            if not isinstance(ranges, str):
                start = unit.comm.rank * span.shard_nbytes
                ranges = _cut(ranges, start, start + span.shard_nbytes) or "parameters of other ranks alone"
            if isinstance(ranges, str):
                left.append(ranges)
                copied += span.shard_nbytes
            else:
                found[span.key] = (Spec(torch.uint8, (span.shard_nbytes,)), ranges)
    if found or left:
        others = f"; {format_bytes(copied)} are copied, such as those with {left[0]}" if left else ""
        nbytes = sum(spec.nbytes for spec, _ in found.values())
        _log.info("%s of frozen parameters are read in place%s", format_bytes(nbytes), others)
    return found


def _ranges(store: Store, segments: Sequence[Segment], source: Weights) -> list[ExternalRange] | str:
    """Return where in the store's external files the bytes of ``segments`` lie, or why they do not lie there."""
    ranges: list[ExternalRange] = []
    for segment in segments:
        place = source.place(segment)
        if place is None:
            return f"{segment.name}, which no file has in this order"
        try:
            entry = store.external.find(*place)
            with store.working_set.condition:
                file = store.external.number(place[0])
        except UsageError:
            return f"{segment.name}, whose file is not among the external ones"
        if getattr(torch, entry.dtype, None) != segment.dtype or entry.nbytes != segment.nbytes:
            return f"{segment.name}, which is {entry.dtype} there and {segment.dtype} here"
        if segment.nbytes:
            ranges.append(ExternalRange(segment.offset, file, entry.offset, entry.nbytes))
    return sorted(ranges) or "parameters without elements"


def _cut(ranges: Sequence[ExternalRange], start: int, stop: int) -> list[ExternalRange]:
    """Return the parts of ``ranges`` within bytes [start, stop), which count from there."""
    found = []
    for each in ranges:
        first, last = max(each.start, start), min(each.start + each.nbytes, stop)
        if first < last:
            found.append(ExternalRange(first - start, each.file, each.offset + first - each.start, last - first))
    return found
