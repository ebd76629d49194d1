"""Digest threads: jobs run once, urgent ones first, wherever there is a thread; and what they do for transfers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store, stored
from tiered.bytes.device.base import IOClass
from tiered.errors import CorruptionError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.store import Store
from tiered.store.transfers.digest_threads import DigestThreads
from tiered.units import MiB

NBYTES = 2 * BLOCK_NBYTES + MiB
VALUE = numbers(NBYTES)


class Blocker:
    """A job that keeps a thread until ``end``."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.end = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.end.wait(WAIT_S)


def block_all(threads: DigestThreads) -> Blocker:
    """Keep every thread that there may be busy; what is submitted afterwards waits for ``end``."""
    blockers = [Blocker() for _ in range(threads._most)]
    for blocker in blockers:
        blocker.end = blockers[0].end
        threads.submit(IOClass.DEMAND, blocker)
    for blocker in blockers:
        assert blocker.has_begun.wait(WAIT_S)
    return blockers[0]


def test_urgent_jobs_pass_the_others_and_close_does_them_all() -> None:
    threads = DigestThreads(num_threads=1)
    blocker = block_all(threads)
    done: list[str] = []

    def job(name: str) -> Callable[[], None]:
        return lambda: done.append(name)

    for io_class in (IOClass.WRITE, IOClass.PREFETCH, IOClass.DEMAND, IOClass.WRITE):
        threads.submit(io_class, job(io_class.name))
    closing = threading.Thread(target=threads.close)
    closing.start()
    assert not done
    blocker.end.set()
    closing.join(WAIT_S)
    assert done == ["DEMAND", "PREFETCH", "WRITE", "WRITE"]
    threads.close()


def test_where_there_is_no_thread_a_job_is_the_submitters_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = DigestThreads()
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        threads.submit(IOClass.WRITE, lambda: done.append(threading.get_ident()))
    threads.close()
    threads.submit(IOClass.DEMAND, lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()] * 2


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    threads = DigestThreads(num_threads=1)
    blocker = block_all(threads)
    with threads._changed:  # held by the parent at that moment: for ever, in the child
        pid = os.fork()
        if pid == 0:
            threads.close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    blocker.end.set()
    threads.close()


class Rig:
    """A store with tensors of three blocks on its device, and the gate before it."""

    def __init__(self) -> None:
        gates: list[GatedDevice] = []

        def gated(device: object) -> GatedDevice:
            gates.append(GatedDevice(device))  # type: ignore[arg-type]
            return gates[-1]

        self.disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
        self.store = simulated_store(self.disk, budget_nbytes=40 * MiB, wrap=gated)
        self.gate = gates[0]
        self.threads = self.store.working_set.space.digest_threads
        self.store.put_many({"a": VALUE, "b": VALUE.flip(0)})
        self.store.commit()
        stored(self.store.working_set, "a", "b")
        self.gate.events.clear()

    def damage(self, key: str, offset: int) -> None:
        (extent,) = next(record for record in self.store.records() if record.name == key).extents
        self.disk.image(0, extent.file)[extent.offset + offset] ^= 1

    def in_thread(self, call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
        """Start ``call`` in a thread; its result, or the exception it raised, will be in the list."""
        found: list[object] = []

        def run() -> None:
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, found


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.gate.open()
    made.store.close()


def is_resident(store: Store, key: str) -> bool:
    return store.working_set.is_resident(key)


def test_blocks_are_checked_before_the_last_one_has_arrived(rig: Rig) -> None:
    rig.damage("a", 5)
    rig.gate.hold = lambda operation: len(operation.memory) < BLOCK_NBYTES  # the third block
    thread, found = rig.in_thread(lambda: rig.store["a"])
    assert rig.gate.has_held.wait(WAIT_S)
    rig.threads.close()  # returns when all that arrived was checked
    (held,) = rig.gate.held
    assert isinstance(held.on_done.func.__self__.error, CorruptionError)  # type: ignore[attr-defined]  # a Transfer's
    assert not found
    rig.gate.open()
    thread.join(WAIT_S)
    (error,) = found
    assert isinstance(error, CorruptionError)
    assert (error.key, error.offset) == ("a", next(r for r in rig.store.records() if r.name == "a").extents[0].offset)


@pytest.mark.parametrize("offset", [0, BLOCK_NBYTES + 1, NBYTES - 1])
def test_damage_found_ahead_of_need_is_raised_by_the_lease(rig: Rig, offset: int) -> None:
    rig.damage("a", offset)
    rig.store.prefetch(["a", "b"])
    for _ in range(2):
        with pytest.raises(CorruptionError, match="does not match its digest") as caught:
            rig.store["a"]
        assert caught.value.key == "a"
    assert torch.equal(rig.store["b"], VALUE.flip(0))
    assert rig.store.working_set.statistics().orphan_bytes == 0


def test_nothing_is_seen_before_it_was_checked_and_the_drive_does_not_wait_for_that(rig: Rig) -> None:
    rig.store.working_set._most_ahead_nbytes = NBYTES  # one read ahead at a time
    blocker = block_all(rig.threads)
    rig.store.prefetch(["a", "b"])
    assert rig.gate.events == ["read"] * 6  # both have arrived
    assert not is_resident(rig.store, "a") and not is_resident(rig.store, "b")
    thread, found = rig.in_thread(lambda: rig.store["b"])
    assert not found
    blocker.end.set()
    thread.join(WAIT_S)
    assert torch.equal(found[0], VALUE.flip(0))  # type: ignore[arg-type]
    assert torch.equal(rig.store["a"], VALUE)


def test_who_starts_a_write_does_not_wait_for_digests(rig: Rig) -> None:
    with rig.store.lease("a", mode="rw") as view:
        view.add_(1)
        blocker = block_all(rig.threads)  # order: so much is dirty that the end of the lease begins to write
    rig.store.working_set.swap_out(["a"])
    assert rig.gate.events == ["read"] * 3
    blocker.end.set()
    rig.store.commit()
    assert rig.gate.events.count("write") == 3
    stored(rig.store.working_set, "a")
    assert torch.equal(rig.store["a"], VALUE + 1)
    assert rig.store.verify().is_clean


def test_a_store_closes_while_blocks_wait_for_their_check(rig: Rig) -> None:
    blocker = block_all(rig.threads)
    rig.store.prefetch(["a", "b"])
    thread, found = rig.in_thread(rig.store.close)
    assert not found
    blocker.end.set()
    thread.join(WAIT_S)
    assert found == [None]
