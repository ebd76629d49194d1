"""The error sweep: a store's whole life on a faulty file system, with the Nth call of some kind going wrong.

Whatever happens, what was acknowledged is there afterwards, no wrong bytes were given out, every error was one of ours,
and nothing took longer than the deadlines allow.
"""

from __future__ import annotations

import errno
import functools
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import tiered.store.lifetime.opening
import tiered.store.store
from tests.rigs.job import contents, put_generation, violation
from tests.rigs.room import Daemon
from tests.store.rig import numbers
from tiered.bytes.device.engines import open_device
from tiered.errors import CorruptionError, TieredError, UsageError
from tiered.store.store import Store

__all__ = ["ERRNOS", "SILENT", "Case", "Outcome", "cases", "short_deadlines", "try_case"]

ERRNOS = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EMFILE,
    errno.ETIMEDOUT,
)  # fmt: skip
SILENT = (
    ("lost", 0), ("torn", 512), ("torn", 4096), ("misdirect", 4096), ("stale", 0), ("flip", 0), ("short", 4096),
    ("short", 0), ("short", 512),
)  # fmt: skip
_FOR_EVER = 1_000_000
_NUM_SESSIONS = 3
_DEADLINE_S = 0.5
_MOST_S = 20.0  # for one case: a few deadlines, on a machine that is busy with other things


@dataclass(frozen=True, slots=True)
class Case:
    """The ``nth`` of the calls on ``file``, and as many after it as ``count`` says, goes wrong in this way."""

    engine: str
    call: str
    file: str
    nth: int
    count: int
    kind: str = "errno"
    errno: int = 0
    nbytes: int = 0

    def rule(self) -> dict[str, Any]:
        return {
            "call": self.call, "file": self.file, "nth": self.nth, "count": self.count, "kind": self.kind,
            "errno": self.errno, "nbytes": self.nbytes,
        }  # fmt: skip

    def __str__(self) -> str:
        what = errno.errorcode[self.errno] if self.errno else f"{self.kind} {self.nbytes}"
        often = "" if self.count == 1 else ", and ever after"
        return f"{self.engine}: {self.call} {self.file} number {self.nth}: {what}{often}"


@dataclass(slots=True)
class Outcome:
    """What a store that met ``case`` did; ``wrong`` says what it must not have done."""

    case: Case
    num_hits: int = 0
    errors: list[str] = field(default_factory=list)  # the types of what was raised
    messages: list[str] = field(default_factory=list)
    wrong: str = ""
    seconds: float = 0.0
    acknowledged: int = 0
    sealed: int = 0


@contextmanager
def short_deadlines(deadline_s: float = _DEADLINE_S) -> Iterator[None]:
    """Let stores that are opened in this block wait no longer than that."""
    store, opening = tiered.store.store, tiered.store.lifetime.opening
    kept = store._DEADLINE_S
    store._DEADLINE_S = deadline_s
    opening.open_device = functools.partial(open_device, deadline_s=deadline_s)  # type: ignore[assignment]
    try:
        yield
    finally:
        store._DEADLINE_S, opening.open_device = kept, open_device


def try_case(daemon: Daemon, case: Case) -> Outcome:
    """Make a store, commit, reopen, read, several times, while ``case`` happens; then look at what is there."""
    outcome, seed = Outcome(case), 1
    place = daemon.mount / "store"
    daemon.call("script", rules=[case.rule()])
    start = time.monotonic()
    for _ in range(_NUM_SESSIONS):
        stores: list[Store] = []
        try:
            with short_deadlines():
                _session(str(place), case.engine, seed, outcome, stores)
        except TieredError as error:
            outcome.errors.append(type(error).__name__)
            outcome.messages.append(str(error))
            if isinstance(error, CorruptionError) and case.errno:
                outcome.wrong = f"an error that a drive reports is no damage: {error}"
            elif isinstance(error, UsageError) and "no store" not in str(error):
                outcome.wrong = f"nobody used it wrongly: {error}"
        except Exception as error:
            outcome.wrong = f"an error that is not ours: {error!r}"
        outcome.num_hits += len(daemon.call("report")["hits"])
        if any(not store._is_released for store in stores):  # something is in flight for ever: now it completes
            daemon.call("script", rules=[])
            stores[0].close()
    outcome.seconds = time.monotonic() - start
    daemon.call("script", rules=[])
    if outcome.seconds > _MOST_S:
        outcome.wrong = outcome.wrong or f"it took {outcome.seconds:.1f} s"
    _, wrong = violation([place], seed, outcome.acknowledged, outcome.sealed, case.engine)
    is_found_out = not case.errno and "CorruptionError" in wrong
    if wrong and not is_found_out:
        outcome.wrong = outcome.wrong or f"afterwards: {wrong}"
    if wrong:
        outcome.errors.append("CorruptionError" if is_found_out else "afterwards")
    shutil.rmtree(place, ignore_errors=True)
    return outcome


def _session(place: str, engine: str, seed: int, outcome: Outcome, stores: list[Store]) -> None:
    """Open, look, change, commit, look again; the store is added to ``stores``. Raises TieredError."""
    with Store(place, dram="8MiB", engine=engine) as store:
        stores.append(store)
        _look(store, seed, outcome)
        put_generation(store, seed, store.generation + 1)
        outcome.sealed = max(outcome.sealed, store.generation + 1)
        store.commit({"generation": store.generation + 1})
        outcome.acknowledged = max(outcome.acknowledged, store.generation)
        _look(store, seed, outcome)


def _look(store: Store, seed: int, outcome: Outcome) -> None:
    found = store.generation
    if not outcome.acknowledged <= found <= outcome.sealed:
        outcome.wrong = f"opened at generation {found}; acknowledged {outcome.acknowledged}, sealed {outcome.sealed}"
    expected = contents(seed, found)
    if set(store) != set(expected):
        outcome.wrong = f"keys {sorted(store)} at generation {found}, expected {sorted(expected)}"
    store.working_set.swap_out(list(store))
    for name, (nbytes, value_seed) in expected.items():
        try:
            if not torch.equal(store[name], numbers(nbytes, value_seed)):
                outcome.wrong = f"{name!r} was read with other bytes"
        except CorruptionError as error:
            if not error.file or (error.key and error.offset < 0):
                outcome.wrong = f"damage without its place: {error!r}"
            raise


def cases(daemon: Daemon, engine: str) -> list[Case]:
    """Return every case: each call that an undisturbed life makes, with each errno, once and for ever.

    In an order of their own, so that the first hundred are of all sorts.
    """
    daemon.call("script", rules=[])
    outcome = Outcome(Case(engine, "", "", 0, 0))
    for _ in range(_NUM_SESSIONS):
        _session(str(daemon.mount / "store"), engine, 1, outcome, [])
    counts: Counter[tuple[str, str]] = Counter()
    for key, number in daemon.call("report")["counts"].items():
        call, file = key.split(" ", 1)
        counts[call, re.sub(r"-[0-9a-f]{16}$", "-*", file)] += number
    assert not outcome.wrong, outcome
    shutil.rmtree(daemon.mount / "store")
    found = []
    for (call, file), number in sorted(counts.items()):
        for nth in range(number):
            for errno_ in ERRNOS:
                # Python and SQLite make an interrupted call again themselves, for as long as it takes.
                often = (1,) if errno_ == errno.EINTR and file != "data-000" else (1, _FOR_EVER)
                if errno_ == errno.EINTR and call not in ("read", "write"):
                    often = (1,)
                found += [Case(engine, call, file, nth, count, errno=errno_) for count in often]
            if call in ("read", "write"):
                silent = [(kind, nbytes) for kind, nbytes in SILENT if kind != "stale" or call == "read"]
                found += [Case(engine, call, file, nth, 1, kind, nbytes=nbytes) for kind, nbytes in silent]
    random.Random(7).shuffle(found)
    return found
