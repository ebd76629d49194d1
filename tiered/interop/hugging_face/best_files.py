"""The files of the best step's weights, read back into a sharded model."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import nn

from tiered.errors import UsageError
from tiered.zero.deferred_files import safetensors_files
from tiered.zero.parameters.parameter import TieredParameter

__all__ = ["load_files"]

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
