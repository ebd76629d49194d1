"""Commit, rollback, resume and close of a store, for a model in it: pending work is finished, dropped or refused."""

from __future__ import annotations

from tiered.errors import StepAbandonedError, UsageError
from tiered.zero.engine import Engine
from tiered.zero.step import in_graph_task

__all__ = ["prepare_for"]


def prepare_for(engine: Engine, word: str) -> None:
    """Get ``engine`` ready for an event of the store: "commit", "rollback", "resume" or "close".

    Pending updates are finished before a close and dropped before the others; a commit asks for them itself. A step
    that was left half done is not committed by a close: it is rolled back. Raises UsageError at the wrong time, and
    the error of an update that failed.
    """
    if word == "commit":
        engine.check_between_steps("commit")
        return
    if in_graph_task():
        raise UsageError(f"{word} inside a backward; expected between steps")
    is_half_done = engine.phase.is_half_done
    failure: Exception | None = None
    is_committing = word == "close" and engine.store.durable
    if is_committing and not is_half_done:
        try:
            engine.updates.finish_all()
        except Exception as error:  # whatever it is, the step is half done
            failure, is_half_done = error, True
    _forget_step(engine)
    if is_committing and is_half_done:
        _drop_half_done(engine, failure)


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
    engine.activations.reset()
    engine.phase.reset()
    engine.open_units.shielded.clear()
    for unit in engine.units:
        unit.num_ops = 0
        unit.outdate()
    engine.open_units.park_all()
    for unit in engine.units:
        unit.gradients.drop()
    engine.open_gradients.end_spares()
    engine.tier.forget()
    engine.backward.forget_touches()
    engine.schedule.forget()
