"""The comm thread does collectives one after the other in program order, and after a failure none."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.ranks.scripted import OnlyIn, ScriptedComm, ScriptedWatch
from tests.test_names import FILES
from tiered.bytes.arena import Arena
from tiered.errors import ClosedError, DeviceError, RankLostError, StepAbandonedError, UsageError
from tiered.ranks import comm_thread as module
from tiered.ranks.agreement import Agreement
from tiered.ranks.comm_thread import CommThread, Ticket

NUM_TASKS = 4
KINDS = ("gather", "exchange", "agree", "gather")
CALLS = ["tell 32", "gather 0", "tell 32", "tell 3", "exchange 1", "tell 32", "tell 5", "tell 32", "gather 3"]
TASK_OF = [0, 0, 1, 1, 1, 2, 2, 3, 3]  # of each call


def interleavings() -> list[str]:
    """Return every order of 4 requests "p" and 4 openings of gates "c", none of which comes before its request."""
    found = {"".join(order) for order in itertools.permutations("p" * NUM_TASKS + "c" * NUM_TASKS)}
    return sorted(o for o in found if all(o[: n + 1].count("c") <= o[: n + 1].count("p") for n in range(len(o))))


@contextmanager
def comm_thread(comm: Any, watch: Any = None, deadline_s: float = 60.0) -> Iterator[CommThread]:
    thread = CommThread(cast(Any, comm), cast(Any, watch or ScriptedWatch()), deadline_s=deadline_s)
    thread.end_first_step()
    try:
        yield thread
    finally:
        thread.close()
        module._unended.discard(thread)  # else a test that runs the interpreter's last actions would leave with 75


def bytes_of(task: int) -> torch.Tensor:
    return torch.full((16,), task, dtype=torch.uint8)


def ask(thread: CommThread, task: int) -> Ticket:
    if KINDS[task] == "agree":
        return thread.agree("a phase", b"12345")
    if KINDS[task] == "gather":
        return thread.gather(f"u{task}", bytes_of(task), owner=task)
    return thread.exchange(f"u{task}", bytes_of(task), received=bytes_of(task), payload=b"123", owner=task)


def play(order: str, wait_order: Sequence[int], comm: ScriptedComm, gates: list[threading.Event]) -> dict[int, Any]:
    """Ask and open gates in ``order``, wait in ``wait_order``; return each task's error, None, or "refused"."""
    found: dict[int, Any] = {}
    with comm_thread(comm) as thread:
        tickets: dict[int, Ticket] = {}
        opened = 0
        for event in order:
            if event == "p":
                task = len(tickets) + sum(error == "refused" for error in found.values())
                try:
                    tickets[task] = ask(thread, task)
                except DeviceError:
                    found[task] = "refused"
            else:
                gates[opened].set()
                opened += 1
        for task in wait_order:
            if task in tickets:
                try:
                    tickets[task].wait()
                    found[task] = None
                except DeviceError as error:
                    found[task] = error
                assert tickets[task].is_over
        owners = thread.close()
        assert thread.close() == owners
        assert sorted(owners) == [task for task, ticket in tickets.items() if ticket.is_quarantined]
    return found


ORDERS = interleavings()


def test_there_are_fourteen_interleavings() -> None:
    assert len(ORDERS) == 14


@pytest.mark.parametrize("order", ORDERS)
def test_tasks_end_in_program_order_in_every_interleaving(order: str) -> None:
    for wait_order in itertools.permutations(range(NUM_TASKS)):
        gates = [threading.Event() for _ in range(NUM_TASKS)]
        comm = ScriptedComm(gates)
        assert set(play(order, wait_order, comm, gates).values()) == {None}
        assert comm.calls == CALLS


@pytest.mark.parametrize("in_wait", [False, True], ids=["issued", "in wait"])
@pytest.mark.parametrize("order", ORDERS)
def test_after_a_call_that_fails_nothing_is_called(order: str, in_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.001)
    for failing in range(len(CALLS)):
        gates = [threading.Event() for _ in range(NUM_TASKS)]
        comm = ScriptedComm(gates, failing=failing, in_wait=in_wait)
        found = play(order, list(range(NUM_TASKS))[:: 1 if failing % 2 else -1], comm, gates)
        first = TASK_OF[failing]
        assert comm.calls == CALLS[: failing + 1]
        assert all(found[task] is None for task in range(first))
        errors = [found[task] for task in range(first, NUM_TASKS)]
        assert all(error == "refused" or f"collective {first + 1}" in str(error) for error in errors)


@pytest.fixture(autouse=True)
def no_quarantine_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_quarantine", [])


def opened(number: int = 8) -> list[threading.Event]:
    gates = [threading.Event() for _ in range(number)]
    for gate in gates:
        gate.set()
    return gates


def test_buffers_of_a_failed_move_are_quarantined_and_those_before_and_after_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.001)
    watch = ScriptedWatch()
    with comm_thread(ScriptedComm(opened(), failing=4), watch) as thread:
        tickets = []
        for task in range(NUM_TASKS):
            try:
                tickets.append(ask(thread, task))
            except DeviceError:
                pass
        for ticket in tickets[1:]:
            with pytest.raises(DeviceError, match="cannot be issued"):
                ticket.wait()
        assert [ticket.frees_buffers for ticket in tickets] == [True, False, True, True][: len(tickets)]
        assert thread.close() == (1,)
        assert thread.statistics().quarantined_bytes == 32
    assert not watch.is_closed  # no goodbye: the process ends at once
    assert [said[0] for said in watch.said] == ["abandoned"]


def test_a_departure_moves_nothing_and_is_no_end_of_a_script() -> None:
    """A rank that has all messages of a departure may say goodbye before another has them: it has ended that one."""
    watch, comm = ScriptedWatch(), ScriptedComm(opened(), departs=True)
    with comm_thread(comm, watch) as thread:
        ticket = thread.exchange("u1", bytes_of(1), received=bytes_of(1), payload=b"123")
        with pytest.raises(UsageError, match=r"rank 0 exchange of u1 \(16 bytes\) with 3 bytes told; rank 1 "):
            ticket.wait()
        assert ticket.frees_buffers and thread.close() == ()
    assert comm.calls == ["tell 32", "tell 256"]
    assert (watch.num_ended, watch.said, watch.is_closed) == (1, [], True)


def test_an_error_of_ready_is_raised_and_told(tmp_path: Path) -> None:
    watch = ScriptedWatch()

    def ready() -> None:
        raise DeviceError("the drive failed")

    with comm_thread(ScriptedComm(opened()), watch) as thread:
        ticket = thread.gather("u0", bytes_of(0), ready=ready)
        with pytest.raises(DeviceError, match="the drive failed"):
            ticket.wait()
        with pytest.raises(DeviceError, match="the drive failed"):
            thread.gather("u1", bytes_of(1))
        assert ticket.frees_buffers and not thread.close()  # no byte of it was under way
    assert watch.said == [("abandoned", "DeviceError: the drive failed")]
    assert watch.is_closed


def test_a_missing_rank_is_named_in_a_line_and_at_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    watch = ScriptedWatch()
    with caplog.at_level(logging.WARNING, "tiered"), comm_thread(ScriptedComm([threading.Event()]), watch, 0.4) as t:
        ticket = t.gather("u0", bytes_of(0))
        with pytest.raises(RankLostError, match=r"rank 1 did not come to collective 1, gather of u0") as caught:
            ticket.wait()
        assert (caught.value.rank, caught.value.place) == (1, "it computes")
        assert ticket.is_quarantined and not ticket.frees_buffers
        assert t.statistics().wait_ranks_s > 0.3
    assert [said[:2] for said in watch.said] == [("place", 1), ("lost", 1)]
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1 and "for rank 1 in collective 1" in lines[0] and "rank 1: it computes" in lines[0]


def test_the_first_step_may_take_three_times_as_long() -> None:
    with comm_thread(ScriptedComm(opened()), deadline_s=7.0) as thread:
        assert thread.deadline_s == 7.0
    thread = CommThread(cast(Any, ScriptedComm(opened())), cast(Any, ScriptedWatch()), deadline_s=7.0)
    assert thread.deadline_s == 21.0
    thread.close()


def test_a_rank_that_asks_for_nothing_tells_its_place_once() -> None:
    watch = ScriptedWatch()
    with comm_thread(ScriptedComm(opened()), watch, deadline_s=0.05) as thread:
        ask(thread, 0).wait()
        told = ("place", 1, "it has asked for nothing since collective 1, gather of u0 (16 bytes)")
        never = threading.Event()
        for _ in range(1000):
            if told in watch.said or never.wait(0.01):
                break
        ask(thread, 1).wait()
    assert watch.said.count(told) == 1


def test_abandoning_ends_all_tickets_and_tells_why() -> None:
    watch = ScriptedWatch()
    with comm_thread(ScriptedComm([threading.Event(), *opened()]), watch) as thread:
        tickets = [ask(thread, task) for task in range(NUM_TASKS)]
        thread.abandon("a user's own error")
        for ticket in tickets:
            with pytest.raises(StepAbandonedError, match="a user's own error"):
                ticket.wait()
        assert [ticket.is_quarantined for ticket in tickets[1:]] == [False] * 3
    assert watch.said == [("abandoned", "a user's own error")]


def test_a_closed_thread_takes_no_task_and_has_done_those_before() -> None:
    gates = [threading.Event() for _ in range(NUM_TASKS)]
    with comm_thread(ScriptedComm(gates)) as thread:
        tickets = [ask(thread, task) for task in range(NUM_TASKS)]
        for gate in gates:
            gate.set()
        thread.close()
        assert all(ticket.frees_buffers and ticket.error is None for ticket in tickets)
        with pytest.raises(ClosedError):
            ask(thread, 0)
        assert thread.statistics().num_collectives == NUM_TASKS
        assert thread.statistics().moved_bytes == 48


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4), torch.zeros(3, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8),
     torch.zeros(8, dtype=torch.uint8)[::2]],
)  # fmt: skip
def test_only_bytes_that_divide_by_the_ranks_are_taken(tensor: torch.Tensor) -> None:
    with comm_thread(ScriptedComm(opened())) as thread, pytest.raises(ValueError, match=r"bytes|uint8"):
        thread.gather("u0", tensor)


def test_a_collective_outside_the_comm_thread_is_caught() -> None:
    comm = OnlyIn(cast(Any, ScriptedComm(opened())))
    with comm_thread(comm) as thread:
        for task in range(NUM_TASKS):
            ask(thread, task).wait()
        with pytest.raises(AssertionError, match="gather was called in MainThread"):
            thread.comm.gather(bytes_of(0))


def test_no_file_but_those_of_the_room_names_a_collective_of_torch() -> None:
    calls = re.compile(
        r"\.(all_to_all_single|alltoall_base|allgather|all_gather_\w+|all_reduce|reduce_scatter\w*|irecv|isend)\("
        r"|\b(dist|distributed)\.(broadcast|barrier|all_gather|monitored_barrier|send|recv)\("
    )
    rooms = {file.parent.name for file in FILES if calls.search(file.read_text())}
    assert rooms - {"doctor"} == {"ranks"}  # the doctor tries gloo in processes of its own


def test_a_phase_raises_the_same_error_and_hands_interrupts_on() -> None:
    watch = ScriptedWatch()
    with comm_thread(ScriptedComm(opened()), watch) as thread:
        agreement = Agreement(thread)
        assert agreement.agree("open", "here") == ("here", "here")
        with pytest.raises(ValueError, match="at most 511 bytes"):
            agreement.agree("open", "x" * 512)
        with pytest.raises(DeviceError, match="shard failed on 2 of the ranks: rank 0: no space; rank 1: no space"):
            with agreement.phase("shard"):
                raise DeviceError("no space")
        with pytest.raises(KeyboardInterrupt), agreement.phase("export"):
            raise KeyboardInterrupt
        with pytest.raises(StepAbandonedError, match="KeyboardInterrupt in export"):
            agreement.agree("close")
    assert watch.said == [("abandoned", "KeyboardInterrupt in export")]


def test_an_arena_closes_under_a_buffer_in_quarantine_and_leaves_it_mapped() -> None:
    arena = Arena(1 << 20)
    buffer, other = arena.allocate_nowait(8192), arena.allocate_nowait(8192)
    assert buffer is not None and other is not None
    arena.quarantine(buffer)
    assert arena.leased_nbytes == 16384
    arena.close()
    assert arena.leased_nbytes == 16384  # the other one is in use
    arena.release(other)
    assert arena.leased_nbytes == 0
    buffer.memory[:4] = b"late"
    assert bytes(buffer.memory[:4]) == b"late"


class _Wordless(Exception):
    """An error of the caller's whose message and whose copy fail."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("one alone")

    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [SystemExit(3), _Wordless(1, 2)], ids=["SystemExit", "an error without words"])
def test_whatever_ready_raises_every_ticket_ends(error: BaseException) -> None:
    def ready() -> None:
        raise error

    with comm_thread(ScriptedComm([])) as thread:
        tickets = [thread.gather("u0", bytes_of(0), ready=ready), thread.agree("a phase", b"1")]
        for ticket in tickets:
            with pytest.raises((DeviceError, _Wordless)):
                ticket.wait()


def test_units_of_odd_names_have_digests_of_their_own() -> None:
    digests = []
    for unit in ("\ud800", "\ud801", "?"):
        with comm_thread(ScriptedComm([])) as thread:
            digests.append(thread.gather(unit, bytes_of(0)).task.digest)
    assert len(set(digests)) == 3


def test_tensors_of_one_exchange_do_not_overlap() -> None:
    whole, gate = torch.zeros(24, dtype=torch.uint8), threading.Event()
    gate.set()
    with comm_thread(ScriptedComm([gate])) as thread:
        for send, received in ((whole, whole), (whole[:16], whole[8:])):
            with pytest.raises(ValueError, match=r"overlap in memory"):
                thread.exchange("u0", send, received=received)
        thread.exchange("u0", whole[:12], received=whole[12:]).wait()


def test_a_forked_child_has_no_collectives() -> None:
    gate = threading.Event()
    with comm_thread(ScriptedComm([gate])) as thread:
        ticket = thread.gather("u0", bytes_of(0))
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (ticket.wait, lambda: thread.abandon("no"), lambda: thread.agree("a phase", b"1")):
                try:
                    call()
                except UsageError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        gate.set()
        ticket.wait()
