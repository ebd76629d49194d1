"""A Comm and a Watch that do what a test says: collectives end when they are told to, and calls fail by number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tiered.ranks.comm import Comm

__all__ = ["OnlyIn", "ScriptedComm", "ScriptedMoving", "ScriptedWatch"]


class ScriptedMoving:
    """A collective that ends when ``gate`` is open; its first wait fails if ``fails`` is true."""

    event = None

    def __init__(self, gate: threading.Event, messages: list[bytes], *, fails: bool) -> None:
        self.buffers: Sequence[torch.Tensor] = ()
        self.messages = messages
        self._gate = gate
        self._fails = fails

    def wait(self, timeout_s: float) -> bool:
        if self._fails:
            raise RuntimeError("scripted: the connection broke")
        return self._gate.wait(timeout_s)


class ScriptedComm:
    """Two ranks in one process, of which the other says what this one says.

    ``calls`` are those made so far; call number ``failing`` fails, as it is issued or, ``in_wait``, in its first wait.
    ``gates`` hold the moves of the tasks by the first byte of their buffer.
    """

    rank, world = 0, 2

    def __init__(
        self, gates: Sequence[threading.Event], *, failing: int = -1, in_wait: bool = False, departs: bool = False
    ) -> None:
        self.calls: list[str] = []
        self._gates = gates
        self._failing = failing
        self._in_wait = in_wait
        self._departs = departs  # the other rank says something else than this one
        self._open = threading.Event()
        self._open.set()

    def fence(self) -> object:
        return None

    def gather(self, whole: torch.Tensor, after: object = None) -> ScriptedMoving:
        return self._called(f"gather {int(whole[0])}", self._gates[int(whole[0])], [])

    def exchange(self, send: torch.Tensor, received: torch.Tensor, *, after: object = None) -> ScriptedMoving:
        return self._called(f"exchange {int(send[0])}", self._gates[int(send[0])], [])

    def tell(self, message: bytes) -> ScriptedMoving:
        return self._called(f"tell {len(message)}", self._open, [message, message[::-1] if self._departs else message])

    def _called(self, call: str, gate: threading.Event, messages: list[bytes]) -> ScriptedMoving:
        number = len(self.calls)
        self.calls.append(call)
        if number == self._failing and not self._in_wait:
            raise RuntimeError("scripted: it cannot be issued")
        return ScriptedMoving(gate, messages, fails=number == self._failing)


class ScriptedWatch:
    """A watch that has heard nothing, and notes what it is told to say."""

    known_s = 0.0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.said: list[tuple[Any, ...]] = []
        self.num_ended = 0
        self.is_closed = False

    def check(self, number: int, text: str = "") -> None:
        if self.error is not None:
            raise self.error

    def note_end_of(self, number: int) -> None:
        self.num_ended = number

    def tell_place(self, number: int, place: str) -> None:
        self.said.append(("place", number, place))

    def tell_abandoned(self, reason: str) -> None:
        self.said.append(("abandoned", reason))

    def tell_lost(self, rank: int, reason: str) -> None:
        self.said.append(("lost", rank, reason))

    def deliver(self, timeout_s: float) -> None:
        pass

    def place_of(self, rank: int) -> str:
        return "it computes" if rank == 1 else ""

    def missing(self, number: int) -> list[int]:
        return [1]

    def close(self, deadline_s: float) -> bool:
        self.is_closed = True
        return True


class OnlyIn:
    """An adaptor over a Comm: a collective from another thread than the comm thread is an AssertionError."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank, self.world = comm.rank, comm.world
        self.fence: Callable[[], object] = comm.fence

    def __getattr__(self, name: str) -> Any:
        thread = threading.current_thread().name
        assert thread.startswith("tiered comm of rank"), f"{name} was called in {thread}"
        return getattr(self._comm, name)
