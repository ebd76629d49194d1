"""The division of a model into units, the modules that move together.

This is policy only: the division looks at the module tree and at sizes, and touches no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tiered.errors import UsageError
from tiered.units import MiB

__all__ = ["UnitRule", "divide_into_units"]

UnitRule = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGE_NBYTES = 16 * MiB


def divide_into_units(model: nn.Module, rule: UnitRule) -> dict[str, nn.Module]:
    """Return the modules that are units, by name, in the order of ``model.named_modules()``; the rest is the root's.

    ``rule``: a module class or several, or a function ``(name, module) -> bool``. None: the elements of each
    ``ModuleList``, ``Sequential`` or ``ModuleDict`` of repeated blocks, and each remaining module whose own parameters
    take at least 16 MiB or an eighth of the model. Raises UsageError for a rule that finds nothing.
    """
    if rule is None:
        return _default(model)
    chosen: dict[str, nn.Module]
    if isinstance(rule, type | tuple):
        kinds: Any = rule
        chosen = {name: module for name, module in model.named_modules() if name and isinstance(module, kinds)}
    elif callable(rule):
        chosen = {name: module for name, module in model.named_modules() if name and rule(name, module)}
    else:
        raise TypeError(
            f"unit={rule!r}; expected a module class, a tuple of them, a function (name, module) -> bool, or None"
        )
    chosen = {name: module for name, module in chosen.items() if _nbytes(module)}
    if not chosen:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(f"unit={rule!r} matches no module with parameters; the model has {', '.join(present)}")
    return chosen


def _default(model: nn.Module) -> dict[str, nn.Module]:
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS) and not _inside(name, units) and _is_repeated(module):
            for child_name, child in module.named_children():
                if _nbytes(child):
                    units[f"{name}.{child_name}" if name else child_name] = child
    large = min(_LARGE_NBYTES, max(1, _nbytes(model) // 8))
    for name, module in model.named_modules():
        if name and not _inside(name, units) and _own_nbytes(module) >= large:
            units[name] = module
    order: dict[str, int] = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(units.items(), key=lambda item: order[item[0]]))


def _is_repeated(container: nn.Module) -> bool:
    kinds = [type(child) for child in container.children() if _nbytes(child)]
    return len(kinds) > len(set(kinds))


def _inside(name: str, units: dict[str, nn.Module]) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _own_nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
