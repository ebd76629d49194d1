"""Commit, rollback, resume and close of a store, for a model in it: pending work is finished, dropped or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiered.errors import StepAbandonedError, UsageError
from tiered.zero.engine import Engine
from tiered.zero.step import in_graph_task

__all__ = ["prepare_for", "returning"]


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
        engine.phase.abandon(f"its updates were dropped for a {word} that did not come to its end")
    _forget_step(engine)
    if is_committing and is_half_done:
        _drop_half_done(engine, failure)


@contextmanager
def returning(engine: Engine) -> Iterator[None]:
    """Hold ``engine`` back while the store loads the last commit, and let it go on where that has come to its end."""
    engine.phase.abandon("the return to the last commit did not come to its end")
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
    engine.activations.reset()
    engine.phase.forget_step()
    engine.open_units.shielded.clear()
    for unit in engine.units:
        unit.num_ops = 0
        unit.outdate()
    try:
        engine.open_units.park_all()
        for unit in engine.units:
            unit.gradients.drop()
        engine.open_gradients.end_spares()
    finally:  # of a device that has failed, whose copies keep leases
        engine.tier.forget()
    engine.backward.forget_touches()
    engine.schedule.forget()
