"""Which operation a device starts next, and how much of each class it has in flight."""

import mmap
import random
from collections.abc import Iterator

import pytest

from tiered.bytes.device.base import IOClass, Operation
from tiered.bytes.device.queue import InFlight, IOQueue
from tiered.units import MiB

DEMAND, UPDATE, PREFETCH, WRITE = IOClass
NOW = 0.0


def operation(io_class: IOClass, nbytes: int = 4096) -> Operation:
    return Operation(
        is_write=io_class is WRITE,
        file=0,
        offset=0,
        memory=memoryview(mmap.mmap(-1, nbytes)),
        io_class=io_class,
        on_done=lambda _: None,
    )


def take_all(queue: IOQueue, now: float = NOW) -> list[InFlight]:
    found = []
    while (flight := queue.take(now)) is not None:
        found.append(flight)
    return found


def in_flight_nbytes(flights: list[InFlight], io_class: IOClass) -> int:
    return sum(flight.nbytes for flight in flights if flight.io_class is io_class)


def test_the_most_urgent_goes_first_then_the_oldest() -> None:
    queue = IOQueue(16)
    operations = [operation(io_class) for io_class in (WRITE, PREFETCH, DEMAND, WRITE, UPDATE, DEMAND)]
    queue.put(operations)
    assert [operations.index(flight.operation) for flight in take_all(queue)] == [2, 5, 4, 1, 0, 3]
    assert queue.num_queued == 0 and queue.num_in_flight == 6


def test_a_demand_read_never_queues_behind_more_than_a_few_writes() -> None:
    queue = IOQueue(256)
    queue.put([operation(WRITE, 4 * MiB) for _ in range(100)])
    before = take_all(queue)
    assert in_flight_nbytes(before, WRITE) > 32 * MiB  # nobody waits: as deep as the drive likes
    queue.put([operation(DEMAND, MiB)])
    (demand,) = take_all(queue)
    assert demand.io_class is DEMAND
    for flight in before:
        queue.done([flight], NOW)
    (write,) = take_all(queue)  # somebody waits
    assert queue.most_nbytes(write, NOW) == MiB and queue.most_nbytes(demand, NOW) == demand.nbytes
    queue.done([demand], NOW)
    assert take_all(queue, NOW + 0.01) == []  # and perhaps again, soon
    assert in_flight_nbytes(take_all(queue, NOW + 10), WRITE) > 16 * MiB
    assert queue.most_nbytes(write, NOW + 10) == 4 * MiB


def test_writes_are_a_quarter_of_what_a_caller_waits_for_and_an_update_waits_beside_all_of_them() -> None:
    queue = IOQueue(256, piece_nbytes=16 * MiB)
    queue.put([operation(UPDATE, 16 * MiB), *[operation(WRITE, MiB) for _ in range(200)]])
    before = take_all(queue)
    assert in_flight_nbytes(before, WRITE) > 32 * MiB
    queue.put([operation(DEMAND, 16 * MiB) for _ in range(3)])
    demands = take_all(queue)
    assert [flight.io_class for flight in demands] == [DEMAND] * 3
    queue.done(before, NOW)
    assert in_flight_nbytes(take_all(queue), WRITE) == 12 * MiB


def test_prefetch_and_writes_have_budgets_of_their_own() -> None:
    queue = IOQueue(256)
    queue.put([operation(io_class, 4 * MiB) for io_class in (WRITE, PREFETCH) for _ in range(200)])
    flights = take_all(queue)
    for io_class in (WRITE, PREFETCH):
        assert 32 * MiB <= in_flight_nbytes(flights, io_class) <= 256 * MiB


@pytest.mark.parametrize(
    ("io_class", "gb_per_s", "mib"),
    [(WRITE, 1, 32), (WRITE, 4, 76), (WRITE, 50, 128), (PREFETCH, 1, 64), (PREFETCH, 4, 76), (DEMAND, 1, 64)],
)
def test_a_budget_is_what_the_drive_moves_in_20_ms(io_class: IOClass, gb_per_s: float, mib: int) -> None:
    queue = IOQueue(256)
    now = NOW
    for _ in range(4):
        queue.put([operation(io_class, MiB) for _ in range(256)])
        flights = take_all(queue, now)
        for _ in range(128):
            now += MiB / (gb_per_s * 1e9)
            queue.done([flights.pop(0)], now)
            flights += take_all(queue, now)
        for flight in flights:
            now += MiB / (gb_per_s * 1e9)
            queue.done([flight], now)
        assert queue.num_in_flight == 0
    queue.put([operation(io_class, MiB) for _ in range(256)])
    assert in_flight_nbytes(take_all(queue, now), io_class) // MiB == mib


def test_one_operation_of_a_class_may_always_go_however_large() -> None:
    queue = IOQueue(256)
    queue.put([operation(io_class, 300 * MiB) for io_class in IOClass for _ in range(2)])
    assert sorted(flight.io_class for flight in take_all(queue)) == list(IOClass)


@pytest.mark.parametrize("io_class", list(IOClass))
def test_of_a_large_operation_a_piece_counts(io_class: IOClass) -> None:
    queue = IOQueue(256, piece_nbytes=16 * MiB)
    queue.put([operation(io_class, 300 * MiB) for _ in range(5)])
    flights = take_all(queue)
    assert len(flights) == 4  # 64 MiB in pieces of 16
    assert queue.most_nbytes(flights[0], NOW + 10) == 16 * MiB
    queue.done(flights[:1], NOW)
    assert len(take_all(queue)) == 1


def test_an_engine_that_ends_has_all_of_it_back() -> None:
    queue = IOQueue(256, piece_nbytes=16 * MiB)
    queue.put([operation(PREFETCH, 300 * MiB) for _ in range(9)])
    queue.done(queue.take_all(NOW), NOW)
    queue.put([operation(PREFETCH, 4 * MiB) for _ in range(20)])
    assert len(take_all(queue)) == 16


def test_small_operations_of_one_class_leave_slots_for_the_others() -> None:
    for crowd in (PREFETCH, WRITE):
        queue = IOQueue(8)
        queue.put([operation(crowd) for _ in range(100)])
        assert len(take_all(queue)) == 6
        other = PREFETCH if crowd is WRITE else WRITE
        queue.put([operation(other), operation(DEMAND)])
        assert sorted(flight.io_class for flight in take_all(queue)) == sorted([other, DEMAND])


@pytest.mark.parametrize("most", [1, 128])
@pytest.mark.parametrize("num_slots", [3, 4, 8, 128])
def test_steady_demand_reads_leave_a_slot_to_every_class(num_slots: int, most: int) -> None:
    queue = IOQueue(num_slots)
    queue.put([operation(DEMAND) for _ in range(2 * num_slots)])
    others = [UPDATE, PREFETCH, WRITE] if num_slots > 3 else [PREFETCH, WRITE]
    queue.put([operation(other) for other in others])
    now = NOW
    flights: list[InFlight] = []
    seen: set[IOClass] = set()
    for _ in range(4):
        while new := queue.take_some(now, most):
            flights += new
        seen |= {flight.io_class for flight in flights}
        assert len(flights) == num_slots
        queue.done([flights.pop(0)], now)
        queue.put([operation(DEMAND)])
    assert seen == {DEMAND, *others}


@pytest.mark.parametrize("num_slots", [3, 8])
def test_writes_that_come_later_get_the_next_slot(num_slots: int) -> None:
    queue = IOQueue(num_slots)
    queue.put([operation(DEMAND) for _ in range(2 * num_slots)])
    flights = take_all(queue)
    assert len(flights) == num_slots  # nobody else waits: all are theirs
    queue.put([operation(WRITE)])
    assert take_all(queue) == []
    queue.done([flights.pop()], NOW)
    assert [flight.io_class for flight in take_all(queue)] == [WRITE]


@pytest.mark.parametrize("num_slots", [1, 2, 8, 128])
def test_every_operation_is_taken_once_whatever_completes_when(num_slots: int) -> None:
    numbers = random.Random(num_slots)
    queue = IOQueue(num_slots)
    operations = [operation(numbers.choice(list(IOClass)), numbers.choice([1, 4096, MiB])) for _ in range(300)]
    waiting = list(operations)
    taken: list[Operation] = []
    flights: list[InFlight] = []
    now = 0.0
    while waiting or queue.num_queued or flights:
        now += numbers.random() / 50
        queue.put([waiting.pop() for _ in range(min(len(waiting), numbers.randrange(8)))])
        new = take_all(queue, now)
        taken += [flight.operation for flight in new]
        flights += new
        assert queue.num_in_flight == len(flights) <= num_slots
        assert flights or not queue.num_queued, "nothing is in flight and nothing may start"
        numbers.shuffle(flights)
        for _ in range(numbers.randrange(len(flights) + 1)):
            queue.done([flights.pop()], now)
    assert sorted(map(id, taken)) == sorted(map(id, operations))


def test_an_operation_whose_class_was_raised_keeps_its_place() -> None:
    queue = IOQueue(8)
    raised = operation(PREFETCH, MiB)
    queue.put([raised, operation(PREFETCH)])
    raised.io_class = DEMAND
    flights = take_all(queue)
    assert flights[0].operation is raised
    for flight in flights:
        queue.done([flight], NOW)
    assert queue.num_in_flight == 0 and not any(waiting.num_taken for waiting in queue._queues)
    queue.put([operation(DEMAND)])
    assert take_all(queue)[0].io_class is DEMAND


def test_a_batch_is_queued_whole_or_not_at_all() -> None:
    queue = IOQueue(8)

    def interrupted() -> Iterator[Operation]:
        yield operation(WRITE)
        yield operation(DEMAND)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.put(interrupted())
    assert queue.num_queued == 0 and take_all(queue) == []
    queue.put([operation(WRITE), operation(DEMAND)])
    assert queue.num_queued == 2 and len(take_all(queue)) == 2 and queue.num_queued == 0
