import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered.bytes.device.base import SCRATCH
from tiered.errors import CapacityError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.committed_rows import EXTENTS_DTYPE
from tiered.store.format.row import Extent, pieces
from tiered.store.space.extents import GROWTH_NBYTES, ExtentAllocator, ExtentError, block_order
from tiered.units import MiB, round_up

PAGE = 4096
UNIT = MiB  # the alignment of the model's allocator
ROOM = [1 << 50] * 2  # of drives that never fill up


def allocator_of(*sizes, alignment=PAGE, max_file_nbytes=1 << 40):
    allocator = ExtentAllocator(len(sizes), alignment, max_file_nbytes=max_file_nbytes)
    for device, size in enumerate(sizes):
        allocator.add_space(device, 0, 0, size)
    return allocator


def grow(allocator, plan, sizes):
    for device, file, size in plan:
        allocator.add_space(device, file, sizes.get((device, file), 0), size)
        sizes[device, file] = size


def units_of(extents):
    return {
        (e.device, e.file, unit) for e in extents for unit in range(e.offset // UNIT, (e.offset + e.nbytes) // UNIT)
    }


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a set of free pages."""

    def __init__(self):
        super().__init__()
        self.allocator = ExtentAllocator(2, UNIT, max_file_nbytes=64 * UNIT)
        self.sizes = {}
        self.free = {False: set(), True: set()}
        self.holes = set()
        self.used = []

    @rule(device=st.integers(0, 1), file=st.integers(-1, 2), growth=st.integers(0, 20))
    def add_space(self, device, file, growth):
        old = self.sizes.get((device, file), 0)
        self.sizes[device, file] = old + growth * UNIT
        self.allocator.add_space(device, file, old, old + growth * UNIT)
        self.free[file == SCRATCH] |= {(device, file, old // UNIT + i) for i in range(growth)}

    @rule(nbytes=st.integers(0, 30 * UNIT), scratch=st.booleans())
    def allocate(self, nbytes, scratch):
        free = self.free[scratch]
        extents = self.allocator.allocate_nowait(nbytes, scratch=scratch)
        if round_up(nbytes, UNIT) > len(free) * UNIT:
            assert extents is None
            return
        pages = units_of(extents)
        assert sum(e.nbytes for e in extents) == round_up(nbytes, UNIT) == len(pages) * UNIT
        assert pages <= free
        free -= pages
        if extents:
            self.used.append((extents, scratch))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def end(self, data):
        extents, scratch = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.allocator.free(extents)
        self.free[scratch] |= units_of(extents)
        with pytest.raises(AssertionError):
            self.allocator.free(extents)

    @rule(nbytes=st.integers(1, 200 * UNIT), scratch=st.booleans())
    def grow(self, nbytes, scratch):
        plan = self.allocator.plan_growth(nbytes, ROOM, scratch=scratch)
        assert (plan == []) == (round_up(nbytes, UNIT) <= len(self.free[scratch]) * UNIT)
        for device, file, size in plan:
            assert (file == SCRATCH) == scratch and (scratch or size <= 64 * UNIT)
            old = self.sizes.get((device, file), 0)
            assert size > old
            self.allocator.add_space(device, file, old, size)
            self.sizes[device, file] = size
            self.free[scratch] |= {(device, file, page) for page in range(old // UNIT, size // UNIT)}
        extents = self.allocator.allocate_nowait(nbytes, scratch=scratch)
        self.free[scratch] -= units_of(extents)
        self.used.append((extents, scratch))

    @rule(nbytes=st.integers(1, 40 * UNIT), least=st.integers(1, 3 * UNIT))
    def dig(self, nbytes, least):
        dug = units_of(self.allocator.dig(nbytes, least))
        assert dug <= self.free[False] and len(dug) * UNIT <= nbytes
        self.free[False] -= dug
        self.holes |= dug

    @rule(device=st.integers(0, 1), file=st.integers(0, 2), start=st.integers(0, 40), nbytes=st.integers(0, 40))
    def dig_range(self, device, file, start, nbytes):
        if (device, file) in self.sizes:
            self.allocator.dig_range(device, file, start * UNIT, (start + nbytes) * UNIT)
            dug = {
                unit for unit in self.free[False] if unit[:2] == (device, file) and start <= unit[2] < start + nbytes
            }
            self.free[False] -= dug
            self.holes |= dug

    @rule(nbytes=st.integers(1, 200 * UNIT), room=st.integers(0, 60 * UNIT))
    def fill(self, nbytes, room):
        missing = round_up(nbytes, UNIT) - len(self.free[False]) * UNIT
        holes = self.allocator.holes(nbytes, [room, room], scratch=False)
        assert missing > 0 or not holes
        filled = units_of(holes)
        assert filled <= self.holes and len(filled) * UNIT == sum(hole.nbytes for hole in holes) <= 2 * room
        assert bool(holes) == bool(missing > 0 and room >= UNIT and self.holes)
        for hole in reversed(holes):
            self.allocator.fill([hole])
        self.holes -= filled
        self.free[False] |= filled

    @invariant()
    def counters_agree(self):
        assert self.allocator.free_nbytes() == len(self.free[False]) * UNIT
        assert self.allocator.free_nbytes(scratch=True) == len(self.free[True]) * UNIT
        used = {
            scratch: sum(len(units_of(e)) for e, s in self.used if s is scratch) * UNIT for scratch in (False, True)
        }
        assert self.allocator.used_nbytes() == used[False]
        assert self.allocator.used_nbytes(scratch=True) == used[True]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_best_fit_takes_the_shortest_range_that_is_long_enough():
    allocator = allocator_of(10 * PAGE)
    extents = [allocator.allocate_nowait(n * PAGE)[0] for n in (3, 1, 2, 1, 3)]
    allocator.free([extents[0], extents[2], extents[4]])
    assert allocator.allocate_nowait(2 * PAGE) == (extents[2],)


def test_a_record_is_split_only_when_no_range_is_long_enough():
    allocator = allocator_of(7 * PAGE)
    extents = [allocator.allocate_nowait(PAGE)[0] for _ in range(7)]
    allocator.free(extents[::2])
    assert len(allocator.allocate_nowait(3 * PAGE)) == 3
    assert allocator.allocate_nowait(2 * PAGE) is None
    assert allocator.free_nbytes() == PAGE


def test_another_device_with_a_long_range_comes_before_splitting():
    allocator = allocator_of(3 * PAGE, 4 * PAGE)
    first = allocator.allocate_nowait(PAGE)
    assert first[0].device == 0
    allocator.allocate_nowait(PAGE)
    (extent,) = allocator.allocate_nowait(3 * PAGE)
    assert extent.device == 1


def test_large_records_are_spread_in_shares_of_whole_blocks():
    allocator = allocator_of(*[64 * MiB] * 3)
    extents = allocator.allocate_nowait(7 * BLOCK_NBYTES + PAGE)
    assert [(e.device, e.nbytes) for e in extents] == [
        (0, 3 * BLOCK_NBYTES),
        (1, 3 * BLOCK_NBYTES),
        (2, BLOCK_NBYTES + PAGE),
    ]
    for nbytes, shares in ((3, [1, 1, 1]), (4, [2, 1, 1]), (6, [2, 2, 2])):
        extents = allocator_of(*[64 * MiB] * 3).allocate_nowait(nbytes * BLOCK_NBYTES)
        assert [e.nbytes // BLOCK_NBYTES for e in extents] == shares
        assert sorted(e.device for e in extents) == [0, 1, 2]


def test_small_records_take_the_devices_in_turn():
    allocator = allocator_of(*[64 * MiB] * 3)
    assert [allocator.allocate_nowait(PAGE)[0].device for _ in range(6)] == [0, 1, 2, 0, 1, 2]


@settings(max_examples=60)
@given(st.integers(1, 4), st.lists(st.integers(0, 60 * MiB), min_size=1, max_size=40))
def test_allocations_of_any_size_come_out_in_equal_parts(num_devices, sizes):
    allocator = allocator_of(*[4096 * MiB] * num_devices)
    taken = [0] * num_devices
    for size in sizes:
        extents = allocator.allocate_nowait(size)
        assert sum(e.nbytes for e in extents) == round_up(size, PAGE) and len(extents) <= num_devices
        if size >= num_devices * BLOCK_NBYTES:
            assert len(extents) == num_devices
            assert all(extent.nbytes % BLOCK_NBYTES == 0 for extent in extents[:-1])  # the last block may be short
        for extent in extents:
            taken[extent.device] += extent.nbytes
        assert max(taken) - min(taken) <= (num_devices + 1) * BLOCK_NBYTES


@pytest.mark.parametrize("scratch", [False, True])
def test_what_a_device_lacks_the_others_give_and_it_is_not_made_up_for(scratch):
    allocator = ExtentAllocator(2, PAGE)
    for device, size in enumerate((16 * MiB, 512 * MiB)):
        allocator.add_space(device, SCRATCH if scratch else 0, 0, size)
    kept = [allocator.allocate_nowait(64 * MiB, scratch=scratch) for _ in range(4)]
    on = [{device: sum(e.nbytes for e in extents if e.device == device) for device in (0, 1)} for extents in kept]
    assert on == [{0: 16 * MiB, 1: 48 * MiB}, *[{0: 0, 1: 64 * MiB}] * 3]
    for extents in kept:
        allocator.free(extents)
    on = {e.device: e.nbytes for e in allocator.allocate_nowait(16 * MiB, scratch=scratch)}
    assert on == {0: 8 * MiB, 1: 8 * MiB}


def test_the_turns_of_named_and_scratch_files_do_not_disturb_each_other():
    allocator = allocator_of(64 * MiB, 64 * MiB)
    for device in range(2):
        allocator.add_space(device, SCRATCH, 0, 64 * MiB)
    assert [allocator.allocate_nowait(PAGE, scratch=bool(i % 2))[0].device for i in range(4)] == [0, 0, 1, 1]


def test_a_share_is_split_on_its_device_before_it_goes_to_another():
    allocator = allocator_of(64 * MiB, 64 * MiB)
    taken = [allocator.allocate_nowait(4 * MiB) for _ in range(32)]
    allocator.free(e for extents in taken[::4] for e in extents)  # every other block of the first device
    allocator.free(e for extents in taken[1::2] for e in extents)  # all of the second
    extents = allocator.allocate_nowait(32 * MiB)
    assert sum(e.nbytes for e in extents if e.device == 0) == 16 * MiB and len(extents) == 5


def test_all_devices_grow_alike_so_that_small_tensors_use_each():
    allocator = ExtentAllocator(2, PAGE)
    assert allocator.plan_growth(400 * MiB, ROOM) == [(0, 0, 200 * MiB), (1, 0, 200 * MiB)]
    sizes = {}
    grow(allocator, allocator.plan_growth(PAGE, ROOM), sizes)
    assert sizes == {(0, 0): GROWTH_NBYTES, (1, 0): GROWTH_NBYTES}
    assert {e.device for _ in range(4) for e in allocator.allocate_nowait(PAGE)} == {0, 1}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=6), st.integers(0, BLOCK_NBYTES - 1))
def test_blocks_are_ordered_so_that_devices_take_turns(shares, short):
    sizes = [(device, count * BLOCK_NBYTES) for device, count in shares]
    if sizes:
        sizes[-1] = (sizes[-1][0], sizes[-1][1] - short)
    where = [device for device, count in shares for _ in range(count)]
    order = block_order(sizes)
    assert sorted(order) == list(range(len(where)))
    for wanted in range(3):
        blocks = [block for block in order if where[block] == wanted]
        assert blocks == sorted(blocks)
        for seen in range(1, len(order)):  # never far from its part of what was moved so far
            part = sum(where[block] == wanted for block in order[:seen])
            assert abs(part - seen * len(blocks) / len(order)) <= 2


def test_nothing_needs_no_extent():
    assert allocator_of(PAGE).allocate_nowait(0) == ()


def table_of(*extents):
    return np.array([tuple(extent) for extent in extents], dtype=EXTENTS_DTYPE)


@pytest.mark.parametrize(
    ("extent", "problem"),
    [
        (Extent(0, 0, 100, PAGE), "not aligned"),
        (Extent(0, 0, 0, 100), "not aligned"),
        (Extent(0, 0, 0, 0), "no range"),
        (Extent(0, 0, 9 * PAGE, 2 * PAGE), "ends behind"),
        (Extent(0, 0, (1 << 63) - PAGE, PAGE), "ends behind"),
        (Extent(0, 0, 0, (1 << 63) - PAGE), "ends behind"),
        (Extent(0, 7, 0, PAGE), "ends behind"),
        (Extent(1, 0, 0, PAGE), "no device"),
        (Extent(0, 0, 4 * PAGE, PAGE), "overlaps"),
        (Extent(0, 0, 3 * PAGE, 2 * PAGE), "overlaps"),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_claims_that_cannot_be_are_refused(extent, problem, is_first):
    there = Extent(0, 0, 4 * PAGE, PAGE)
    table = table_of(extent, there) if is_first else table_of(there, extent)
    with pytest.raises(ExtentError, match=problem) as caught:
        allocator_of(10 * PAGE).claim_all(table)
    if problem == "overlaps":  # either of the two is to blame: the later one is
        assert caught.value.index == 1
    else:
        assert (caught.value.index, caught.value.extent) == (1 - is_first, extent)


def test_a_file_that_was_made_and_not_yet_grown_claims_nothing():
    allocator = allocator_of(PAGE, 0, PAGE // 2)
    allocator.claim_all(table_of(Extent(0, 0, 0, PAGE)))
    assert (allocator.free_nbytes(), allocator.used_nbytes()) == (0, PAGE)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 40), st.integers(1, 6)), max_size=30),
    st.permutations(range(30)),
)
def test_claims_leave_the_rest_free(candidates, order):
    allocator = ExtentAllocator(2, PAGE)
    free = {(device, file, page) for device in (0, 1) for file in (0, 1) for page in range(40)}
    for device in (0, 1):
        for file in (0, 1):
            allocator.add_space(device, file, 0, 40 * PAGE)
    claimed = []
    for device, file, page, count in candidates:
        pages = {(device, file, page + i) for i in range(count)}
        if pages <= free:
            free -= pages
            claimed.append(Extent(device, file, page * PAGE, count * PAGE))
    allocator.claim_all(table_of(*(claimed[i] for i in order if i < len(claimed))))
    assert (allocator.free_nbytes(), allocator.used_nbytes()) == (len(free) * PAGE, sum(e.nbytes for e in claimed))
    rest = allocator.allocate_nowait(len(free) * PAGE)
    assert {(e.device, e.file, p) for e in rest for p in range(e.offset // PAGE, (e.offset + e.nbytes) // PAGE)} == free
    allocator.free(rest + tuple(claimed))
    assert allocator.used_nbytes() == 0


def test_space_must_follow_what_is_there():
    allocator = allocator_of(10 * PAGE)
    with pytest.raises(ValueError, match="does not follow"):
        allocator.add_space(0, 0, 9 * PAGE, 11 * PAGE)


def test_a_length_off_the_alignment_counts_up_to_the_last_page():
    allocator = allocator_of(2 * PAGE + 100)
    assert allocator.free_nbytes() == 2 * PAGE
    allocator.add_space(0, 0, 2 * PAGE + 100, 4 * PAGE)
    assert len(allocator.allocate_nowait(4 * PAGE)) == 1


def test_ranges_do_not_run_from_file_to_file():
    allocator = ExtentAllocator(1, PAGE, max_file_nbytes=2 * PAGE)
    for file in range(3):
        allocator.add_space(0, file, 0, 2 * PAGE)
    assert sorted(allocator.allocate_nowait(6 * PAGE)) == [Extent(0, file, 0, 2 * PAGE) for file in range(3)]


def test_growth_is_at_least_64_mib_and_an_eighth():
    assert ExtentAllocator(1, PAGE).plan_growth(PAGE, ROOM[:1]) == [(0, 0, GROWTH_NBYTES)]
    allocator = allocator_of(1024 * MiB)
    allocator.allocate_nowait(1024 * MiB)
    assert allocator.plan_growth(PAGE, ROOM[:1]) == [(0, 0, 1024 * MiB + 128 * MiB)]
    assert allocator.plan_growth(300 * MiB, ROOM[:1]) == [(0, 0, 1324 * MiB)]


def test_growth_goes_on_in_the_next_file_at_the_cap():
    allocator = allocator_of(100 * MiB, max_file_nbytes=128 * MiB)
    allocator.allocate_nowait(100 * MiB)
    sizes = {(0, 0): 100 * MiB}
    plan = allocator.plan_growth(200 * MiB, ROOM[:1])
    assert plan == [(0, 0, 128 * MiB), (0, 1, 128 * MiB), (0, 2, 64 * MiB)]
    grow(allocator, plan, sizes)
    assert sum(e.nbytes for e in allocator.allocate_nowait(200 * MiB)) == 200 * MiB


def test_growth_stays_within_the_room_of_each_device():
    allocator = ExtentAllocator(2, PAGE)
    plan = allocator.plan_growth(100 * MiB, [20 * MiB + 1, 300 * MiB])
    assert plan == [(0, 0, 20 * MiB), (1, 0, 80 * MiB)]
    grow(allocator, plan, {})
    assert allocator.allocate_nowait(100 * MiB) is not None


def test_growth_ahead_of_need_takes_a_quarter_of_the_room_at_most():
    assert ExtentAllocator(1, PAGE).plan_growth(PAGE, [3 * PAGE]) == [(0, 0, PAGE)]
    assert ExtentAllocator(1, PAGE).plan_growth(PAGE, [40 * MiB]) == [(0, 0, 10 * MiB)]
    assert ExtentAllocator(1, PAGE).plan_growth(30 * MiB, [40 * MiB]) == [(0, 0, 30 * MiB)]


def test_growth_beyond_all_rooms_is_refused():
    with pytest.raises(CapacityError, match=r"100\.0 MiB more are needed .* room for 30\.0 MiB"):
        ExtentAllocator(2, PAGE).plan_growth(100 * MiB, [20 * MiB, 10 * MiB])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_pieces_are_the_logical_range(sizes, data):
    extents = [Extent(i % 2, i, 1000 * i, size) for i, size in enumerate(sizes)]
    where = [(e.device, e.file, e.offset + i) for e in extents for i in range(e.nbytes)]
    start = data.draw(st.integers(0, len(where)))
    nbytes = data.draw(st.integers(0, len(where) - start))
    found = list(pieces(extents, start, nbytes))
    assert all(piece.nbytes > 0 for piece in found)
    assert [(e.device, e.file, e.offset + i) for e in found for i in range(e.nbytes)] == where[start : start + nbytes]


def test_pieces_beyond_the_end_are_an_error():
    with pytest.raises(ValueError, match="1 bytes beyond"):
        list(pieces([Extent(0, 0, 0, 10)], 5, 6))
