"""unsharded and accumulate: the two blocks in which a sharded model behaves otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from tiered.errors import CapacityError, UsageError
from tiered.units import format_bytes
from tiered.zero.engine import Engine
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment, Unit, digest
from tiered.zero.shard import accumulating

__all__ = ["accumulate", "unsharded"]


@contextmanager
def unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """Make the parameters of ``module`` (and of the modules in it) ordinary, readable and writable ones.

    Between steps only. The bytes are the store's own: keep no tensor on them beyond the block. Written values count as
    trained: for a bf16 parameter that changed, they become its fp32 master. Raises CapacityError when the module does
    not fit the DRAM budget (use it on one unit at a time), UsageError inside a forward or backward.
    """
    units = _units_of(module)
    engine = _engine_of(units)
    engine.check_idle("unsharded")
    budget = engine.working_set.budget_bytes
    nbytes = sum(unit.nbytes for unit in units)
    if nbytes > budget:
        raise CapacityError(
            f"unsharded({type(module).__name__}) needs {format_bytes(nbytes)} of DRAM, the budget is"
            f" {format_bytes(budget)}; expected a smaller module: use it on one unit at a time"
        )
    lent = engine.plan.lent
    added = [unit for unit in units if unit not in lent]
    lent |= set(added)
    digests: dict[Segment, int] = {}
    try:
        for unit in added:
            unit.park()
            unit.show("rw")
            digests |= {segment: _digest(unit, segment) for segment in unit.segments}
        yield module
        _check_written(engine, added)
    finally:
        lent -= set(added)
        try:
            for unit in added:
                unit.buffer.write_back()
            changed = [s for s, digest in digests.items() if s.unit.is_open and _digest(s.unit, s) != digest]
            for unit in added:
                unit.park()
        except BaseException:
            engine.phase.give_up("a copy of values written inside tiered.unsharded failed")
            raise
        for segment in changed:
            engine.masters.set_master(segment, None)


def accumulate(model: nn.Module) -> AbstractContextManager[None]:
    """A backward inside this block only adds to the gradients; the first one outside adds, and exchanges or updates.

    On one rank under ``update="step"`` every backward only adds, and the block changes nothing. Over several ranks the
    gradients of the block are added up on each, and exchanged once. ``model.no_sync()`` is the same.
    """
    return accumulating(_engine_of(_units_of(model)))


def _check_written(engine: Engine, units: Sequence[Unit]) -> None:
    """Over ranks: raise UsageError, on all, unless all have written the same; each keeps its own piece."""
    ranks = engine.store.ranks
    if ranks is None:
        return
    for unit in units:
        unit.buffer.use()
    lines = [f"unit {u.name!r} with the digests {[f'{digest(t.cpu()):016x}' for t in u.buffer.tensors]}" for u in units]
    try:
        ranks.check_equal("tiered.unsharded", lines, "the same values written on all ranks")
    except UsageError as error:
        engine.phase.give_up(f"the ranks have written other values: {error}")
        raise


def _units_of(module: nn.Module) -> list[Unit]:
    """Return the units of the parameters in ``module``; those that were added after ``shard`` are ordinary anyway."""
    parameters = list(module.parameters())
    units = dict.fromkeys(p.segment.unit for p in parameters if isinstance(p, TieredParameter))
    if not parameters:
        raise UsageError(f"{type(module).__name__} has no parameters; expected a sharded module")
    if not units or not all(isinstance(unit, Unit) for unit in units):
        raise UsageError(f"{type(module).__name__} is not sharded; expected a model that tiered.shard returned")
    return list(units)


def _engine_of(units: list[Unit]) -> Engine:
    engine = units[0].engine
    assert isinstance(engine, Engine)  # or _units_of had refused them
    return engine


def _digest(unit: Unit, segment: Segment) -> int:
    return digest(segment.piece(unit.buffer.leases[segment.span].tensor))
