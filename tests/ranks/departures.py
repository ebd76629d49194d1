"""Departures: a program of collectives that one rank leaves in one of many ways, and what each rank sees of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.processes import Here, case
from tiered.ranks.comm_thread import CommThread, Ticket
from tiered.ranks.watch import Watch

__all__ = ["AT_ONCE", "AWAY", "DEADLINE_S", "KINDS", "complaints", "is_untouched"]

AT_ONCE = (
    "other unit", "other kind", "other order", "one fewer", "one more", "other size", "end of the script",
    "exception caught", "abandons",
)  # fmt: skip
AWAY = ("does nothing", "one more at the end")
KINDS = (*AT_ONCE, *AWAY)
DEADLINE_S = {**dict.fromkeys(AT_ONCE, 40.0), **dict.fromkeys(AWAY, 2.5)}

NBYTES = 12 << 10  # divides by 2, 3 and 4
EMPTY = 0xEE
DEPARTING = 1
STEP = [("gather", "u0"), ("exchange", "u0"), ("gather", "u1"), ("gather", "u2"), ("exchange", "u1"), ("agree", "step")]
AT = 2  # the place in the second step at which the rank departs

Operation = tuple[str, str]


class _Caught(Exception):
    """An error of the user's own that the user's own code catches."""


@dataclass
class Program:
    """The script of one rank: it asks for the next collective before it waits for one, as a prefetch does."""

    here: Here
    are_equal: bool
    started: list[tuple[Operation, Ticket, list[torch.Tensor]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_done: int = 0

    def nbytes(self, unit: str) -> int:
        return NBYTES if self.are_equal else NBYTES * (1 + 3 * int(unit[1]))

    def ask(self, operation: Operation, *, nbytes: int | None = None) -> None:
        kind, unit = operation
        thread, rank, world = self.here.thread, self.here.rank, self.here.world
        if kind == "agree":
            self.started.append((operation, thread.agree(unit, bytes([rank])), []))
            return
        size = nbytes or self.nbytes(unit)
        whole = torch.full((size,), EMPTY, dtype=torch.uint8)
        if kind == "gather":
            whole.view(world, -1)[rank] = mark(unit, rank)
            self.started.append((operation, thread.gather(unit, whole), [whole]))
        else:
            send = torch.full((size,), mark(unit, rank), dtype=torch.uint8)
            ticket = thread.exchange(unit, send, received=whole, payload=bytes([rank]))
            self.started.append((operation, ticket, [whole, send]))

    def wait(self) -> None:
        """Wait for the first that was asked for, and look at its bytes."""
        (kind, unit), ticket, tensors = self.started[0]
        told = ticket.wait()
        self.started.pop(0)
        self.num_done += 1
        if kind != "gather" and told != tuple(bytes([rank]) for rank in range(self.here.world)):
            self.wrong.append(f"{kind} {unit}: told {told}")
        if tensors:
            pieces = tensors[0].view(self.here.world, -1)
            if any(not bool((piece == mark(unit, rank)).all()) for rank, piece in enumerate(pieces)):
                self.wrong.append(f"{kind} {unit}: other bytes")

    def run(self, operations: Iterator[tuple[Operation, int | None]]) -> None:
        for operation, nbytes in operations:
            self.ask(operation, nbytes=nbytes)
            if len(self.started) > 1:
                self.wait()
        while self.started:
            self.wait()

    def touched(self) -> list[str]:
        """Return which collectives that did not end have moved bytes all the same."""
        found = []
        for (kind, unit), ticket, tensors in self.started:
            if ticket.error is None or not tensors:
                continue
            pieces = tensors[0].view(self.here.world, -1)
            theirs = [p for rank, p in enumerate(pieces) if kind == "exchange" or rank != self.here.rank]
            if any(not bool((piece == EMPTY).all()) for piece in theirs):
                found.append(f"{kind} {unit}")
        return found


def mark(unit: str, rank: int) -> int:
    return 16 * int(unit[1]) + rank + 1


def operations(kind: str, departs: bool, reached: Callable[[], object]) -> Iterator[tuple[Operation, int | None]]:
    """Yield what a rank asks for, with the number of bytes where it is another than the unit's."""
    for step in range(3):
        mine = [(each, None) for each in STEP]
        if step == 1 and departs:
            mine = _departed(kind, mine)
        for place, each in enumerate(mine):
            if step == 1 and place == AT:
                reached()
            if each is not None:
                yield each
            elif kind == "exception caught":  # the step's block is left, and the next step begins
                break
            else:
                raise _Caught(kind)


def _departed(kind: str, mine: list[Any]) -> list[Any]:
    if kind == "other unit":
        mine[AT] = (("gather", "u2"), None)
    elif kind == "other kind":
        mine[AT] = (("exchange", "u1"), None)
    elif kind == "other order":
        mine[AT], mine[AT + 1] = mine[AT + 1], mine[AT]
    elif kind == "one fewer":
        del mine[AT]
    elif kind == "one more":
        mine.insert(AT, (("gather", "u0"), None))
    elif kind == "other size":
        mine[AT] = (("gather", "u1"), 2 * NBYTES)
    elif kind in ("end of the script", "exception caught", "does nothing", "abandons"):
        mine[AT] = None
    return mine


class _BytesFirst(CommThread):
    """A mutant: bytes move before the ranks have agreed."""

    def _do(self, task: Any) -> None:
        if task.begin is not None:
            self._move(task, task.begin)
        begin, task.begin = task.begin, None
        super()._do(task)
        task.begin = begin


class _Blind(Watch):
    """A mutant: the watch says nothing."""

    known_s = 0.0  # type: ignore[assignment]

    def check(self, number: int, text: str = "") -> None:
        pass


MUTANTS: dict[str, dict[str, Any]] = {"": {}, "bytes first": {"thread": _BytesFirst}, "watch off": {"watch": _Blind}}


@case
def depart(
    send: Any, *, kind: str, world: int, are_equal: bool, deadline_s: float = 0.0, mutant: str = ""
) -> dict[str, Any] | None:
    """Run the program on the first ``world`` ranks; return what this rank saw."""
    members = dist.new_group(list(range(world)))
    if dist.get_rank() >= world:
        return None
    here = Here.open(members, deadline_s or DEADLINE_S[kind], send, **MUTANTS[mutant])
    program = Program(here, are_equal)
    departs = here.rank == DEPARTING
    times = [time.monotonic()]
    error: Exception | None = None
    try:
        try:
            program.run(operations(kind, departs, lambda: times.append(time.monotonic())))
        except _Caught:
            times.append(time.monotonic())
            if kind == "abandons":
                here.thread.abandon("ValueError: a user's own")
            elif kind == "end of the script":
                while program.started:
                    program.wait()
                here.thread.close()
                return {"ended": True}
        if kind == "one more at the end" and departs:
            program.ask(("gather", "u1"))
            program.wait()
        while kind in KINDS:  # this rank has nothing to ask for: it hears of the others' failure
            here.thread.check()
            time.sleep(0.01)
    except Exception as raised:
        error = raised
    took_s = time.monotonic() - times[-1]
    touched = program.touched()
    owners = here.thread.close()
    return {
        "error": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None), "took_s": took_s,
        "touched": touched, "wrong": program.wrong, "num_done": program.num_done, "num_owners": len(owners),
    }  # fmt: skip


def is_untouched(seen: list[dict[str, Any]]) -> bool:
    return not any(each["touched"] or each["wrong"] for each in seen if "ended" not in each)


def complaints(kind: str, seen: list[dict[str, Any]], *, within_s: float) -> list[str]:
    """Return what is wrong with what the ranks have seen of a departure of ``kind``."""
    found = []
    if not is_untouched(seen):
        found.append("bytes were moved, or wrong")
    world = len(seen)
    for rank, each in enumerate(seen):
        if "ended" in each:
            continue
        text = each["text"]
        if kind in ("end of the script", "abandons"):
            error = "RankLostError" if kind == "end of the script" else "StepAbandonedError"
            names = ["rank 1", "this rank, 1"]
        elif kind in AWAY:
            error, names = "RankLostError", [f"rank {r}" for r in range(world)]
        else:
            error, names = "UsageError", []
            if not all(f"rank {r} " in text for r in range(world)):
                found.append(f"rank {rank}: not all ranks are named")
        if each["error"] != error or (names and not any(name in text for name in names)):
            found.append(f"rank {rank}: expected {error} that names {names}")
        if kind != "abandons" and " of u" not in text and "agreement on" not in text:
            found.append(f"rank {rank}: no unit is named")
        if each["took_s"] > (within_s if kind in AT_ONCE else within_s + DEADLINE_S[kind]):
            found.append(f"rank {rank}: {each['took_s']:.2f} s")
    return [f"{complaint} ({seen})" for complaint in found]
