"""Ends of ranks: programs that are killed, stopped, interrupted or end by themselves."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.ranks.processes import Here, case
from tiered.bytes.arena import Arena, Buffer, array_type
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import RankLostError
from tiered.ranks.comm import GlooComm
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.watch import Watch

_kept: list[Any] = []  # by a case for the next one in the same process


def on(buffer: Buffer) -> torch.Tensor:
    """Return the bytes of ``buffer`` as (nbytes,) uint8; the arena knows nothing of it, as of gloo's pointer."""
    return torch.frombuffer(array_type(buffer.nbytes).from_address(buffer.address), dtype=torch.uint8)


@case
def work_until_the_end(send: Any, *, nbytes: int, deadline_s: float) -> None:
    """Gather and exchange for ever; report the error of another rank's end, and let it leave the main thread."""
    here = Here.open(None, deadline_s, send)
    whole, other = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    send({"began": os.getpid()})
    try:
        while True:
            tickets = [here.thread.gather("u0", whole), here.thread.exchange("u1", other, received=whole.clone())]
            for ticket in tickets:
                ticket.wait()
    except Exception as error:
        send({
            "error": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None),
            "place": getattr(error, "place", None), "at": time.monotonic(),
        })  # fmt: skip
        raise SystemExit(1) from error


def _stop() -> None:
    """Stop this process; the calling thread may still run for a moment, until the kernel has stopped it, too."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)


class _Stopping(GlooComm):
    def exchange(self, *tensors: Any, **how: Any) -> Any:
        _stop()
        return super().exchange(*tensors, **how)


class _Careless(CommThread):
    """A mutant: buffers of a collective that ran out are given back."""

    def _quarantine(self, task: Any) -> None:
        pass


@case
def meet_a_stopped_rank(send: Any, *, is_careless: bool, kind: str) -> dict[str, Any] | None:
    """The last rank stops itself after the agreement; the others meet the deadline and fill all memory they may use."""
    here = Here.open(None, 1.5, send, thread=_Careless if is_careless else CommThread)
    arena = Arena(1 << 20)
    nbytes = 96 << 10  # divides by 2, 3, 4
    buffer = arena.allocate_nowait(nbytes)
    assert buffer is not None
    whole = on(buffer)
    whole.fill_(here.rank + 1)
    stops = here.rank == here.world - 1
    if kind == "gather":
        ticket = here.thread.gather("u0", whole, ready=_stop if stops else None, owner=buffer)
    else:
        sent = torch.full((nbytes,), here.rank + 1, dtype=torch.uint8)
        here.thread.comm = _Stopping(here.group) if stops else here.thread.comm
        ticket = here.thread.exchange("u0", sent, received=whole, owner=buffer)
    error: Any = None
    try:
        ticket.wait()
    except RankLostError as raised:
        error = raised
    is_quarantined = ticket.is_quarantined
    if ticket.frees_buffers:
        arena.release(buffer)
    else:
        arena.quarantine(buffer)
    memory = []
    while (free := arena.allocate_nowait(4096)) is not None:
        memory.append(free)
        on(free).fill_(0x5A)
    _kept.append((here, arena, whole, memory, buffer))
    assert error is None or here.thread.close() == ((buffer,) if is_quarantined else ())
    return {"error": str(error), "rank": error and error.rank, "is_quarantined": is_quarantined, "num": len(memory)}


@case
def look_at_memory(send: Any, *, is_careless: bool) -> dict[str, Any]:
    """Wait for the stopped rank's late bytes; return whether memory in use has changed."""
    here, arena, late, memory, buffer = _kept.pop()
    last = here.world - 1
    came, changed = False, 0
    end = time.monotonic() + 20
    while time.monotonic() < end and here.rank != last:
        changed = sum(not bool((on(each) == 0x5A).all()) for each in memory)
        came = bool((late.view(here.world, -1)[last] == here.world).all())
        if came or changed:
            break
        time.sleep(0.01)
    if not is_careless and here.rank != last:
        for each in memory:
            arena.release(each)
        arena.close()
        assert arena.leased_nbytes == 0
        late[0] = 1  # it is still mapped
        assert ctypes.c_uint8.from_address(buffer.address).value == 1
    return {"came": came, "changed": changed}


def _tell_when_waiting(send: Any) -> None:
    """Tell the parent when the main thread waits in a ticket."""
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "acquire":  # type: ignore[index]
        time.sleep(0.001)
    send({"waits": os.getpid()})


@case
def wait_for_another(send: Any, *, has_store: bool) -> dict[str, Any]:
    """Rank 0 waits for a collective that rank 1 comes to when it is told; an interrupt leaves the wait."""
    here = Here.open(None, 60.0, send)
    if has_store:
        INTERRUPTS.begin(here.thread)  # as an open store does: actions wait for the end of a call, but not of a wait
    whole = torch.zeros(1200, dtype=torch.uint8)
    found: dict[str, Any] = {}
    if here.rank == 0:
        ticket = here.thread.gather("u0", whole)
        witness = threading.Thread(target=_tell_when_waiting, args=(send,))
        witness.start()
        try:
            ticket.wait()
        except KeyboardInterrupt:
            found = {"at": time.monotonic(), "frees": ticket.frees_buffers}
        witness.join()
        send({"left": True})
        ticket.wait()
        found["frees later"] = ticket.frees_buffers
    else:
        path = Path(os.environ["TIERED_TEST_GO"])
        while not path.exists():
            time.sleep(0.01)
        here.thread.gather("u0", whole).wait()
    here.thread.close()
    return found


@case
def die_before_sigterm(send: Any) -> None:
    """Rank 1 dies; rank 0 has an action for SIGTERM that would go on, and gets SIGTERM when it knows of the death."""
    signal.signal(signal.SIGTERM, lambda *_: send({"action": "finish the step, then stop"}))
    here = Here.open(None, 60.0, send)
    INTERRUPTS.begin(here.thread)
    if here.rank == 1:
        os._exit(3)
    if here.rank == 0:
        while not here.watch.known_s:
            time.sleep(0.005)
    send({"knows": here.rank})
    while here.rank == 0:
        time.sleep(0.01)


@case
def open_and_close(send: Any, *, num: int) -> int:
    """Return how many watches are left of ``num`` rooms that were opened and closed."""
    for _ in range(num):
        Here.open(None, 30.0, send).thread.close()
    gc.collect()
    return sum(isinstance(each, Watch) for each in gc.get_objects())
