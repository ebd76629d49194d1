"""Where parameters lie: spans by dtype and trainability, aligned segments, cuts, shares that add up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.models import CASES, Case
from tiered.zero.formats.budget import share_out_as_asked, work_sizes
from tiered.zero.layout import (
    CUT_NUMEL,
    PAGE_NBYTES,
    SegmentSpec,
    UnitLayout,
    cut,
    divide_into_units,
    lay_out,
    share_out,
)
from tiered.zero.parameters.unit import dense_strides

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)

specs = st.lists(
    st.builds(
        lambda index, shape, dtype, trainable: SegmentSpec(
            f"p{index}", tuple(shape), torch.empty(shape, device="meta").stride(), dtype, trainable
        ),
        st.integers(0, 99),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    max_size=12,
)


def layouts_of(case: Case, dtype: torch.dtype | None) -> list[UnitLayout]:
    """Return the layouts of a model's units, the root unit first, as shard makes them."""
    model = case.build()
    modules = divide_into_units(model, case.unit)
    members: dict[str, list[SegmentSpec]] = {"root": [], **{name: [] for name in modules}}
    for name, parameter in model.named_parameters():
        owner = max((n for n in modules if name.startswith(f"{n}.")), key=len, default="root")
        members[owner].append(spec_of(name, parameter, dtype))
    return [lay_out(name, each) for name, each in members.items() if each or name == "root"]


def spec_of(name: str, parameter: nn.Parameter, dtype: torch.dtype | None) -> SegmentSpec:
    cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return SegmentSpec(name, tuple(parameter.shape), dense_strides(parameter), cast, parameter.requires_grad)


@pytest.fixture(scope="module", autouse=True)
def many_buckets() -> None:
    """Here buckets are as large as they are for users."""


@given(specs)
def test_spans_are_of_one_kind_and_segments_lie_apart(specs: list[SegmentSpec]) -> None:
    layout = lay_out("blocks.1", specs)
    assert len({span.key for span in layout.spans}) == len(layout.spans)
    assert len({(span.dtype, span.trainable) for span in layout.spans}) == len(layout.spans)
    assert [span.trainable for span in layout.spans] == sorted((s.trainable for s in layout.spans), reverse=True)
    ends = dict.fromkeys(range(len(layout.spans)), 0)
    for spec, place in zip(layout.specs, layout.places, strict=True):
        span = layout.spans[place.span]
        assert (span.dtype, span.trainable) == (spec.dtype, spec.trainable)
        assert place.offset % (CUT_NUMEL * spec.dtype.itemsize) == 0
        assert ends[place.span] <= place.offset and place.offset + spec.nbytes <= span.nbytes
        assert place.grad_offset == (span.grad_offset + place.offset if spec.trainable else -1)
        ends[place.span] = place.offset + spec.nbytes
    assert layout.gradient_nbytes == sum(span.nbytes for span in layout.spans if span.trainable)
    assert all(span.nbytes % PAGE_NBYTES == 0 for span in layout.spans)


def test_keys_of_units_whose_names_look_like_kinds_do_not_collide() -> None:
    kinds = [SegmentSpec(f"p{i}", (3,), (1,), dtype, i % 2 == 0) for i, dtype in enumerate(DTYPES[:3] * 2)]
    names = ["root", "frozen", "a", "a/frozen", "a.frozen", "bfloat16/a", "bfloat16.frozen/a", "/a", "a/"]
    keys = [span.key for name in names for span in lay_out(name, kinds).spans]
    assert len(set(keys)) == len(keys)
    assert lay_out("a", kinds).spans[0].key == "model/parameters/a"


@given(specs, st.data())
def test_what_moves_is_found_where_it_lies_then(specs: list[SegmentSpec], data: st.DataObject) -> None:
    specs = [spec._replace(name=f"p{i}") for i, spec in enumerate(specs)]
    before = lay_out("root", specs)
    names = data.draw(st.sets(st.sampled_from([spec.name for spec in specs]))) if specs else set()
    after = before.with_trainable(names)
    for spec, old, new in zip(specs, before.places, after.places, strict=True):
        for byte in {0, spec.nbytes // 2, spec.nbytes - 1} if spec.nbytes else ():
            assert after.moved(before, old.span, old.offset + byte) == (new.span, new.offset + byte)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000)), max_size=12), st.integers(1, 20))
def test_cuts_cover_each_stretch_once_in_buckets_of_at_most_so_many_elements(
    drawn: list[tuple[int, int]], size: int
) -> None:
    stretches = [range(first * CUT_NUMEL, first * CUT_NUMEL + numel) for first, numel in drawn]
    buckets = cut(stretches, size * CUT_NUMEL)
    covered = [stretch.start for stretch in stretches]
    for bucket in buckets:
        assert 0 < sum(stop - start for _, start, stop in bucket) <= size * CUT_NUMEL
        for number, start, stop in bucket:
            assert start == covered[number] and start % CUT_NUMEL == 0
            covered[number] = stop
    assert covered == [stretch.stop for stretch in stretches]


@given(specs, st.integers(1, 9))
def test_the_shards_of_all_ranks_are_each_element_once(specs: list[SegmentSpec], world: int) -> None:
    layout, alone = lay_out("root", specs, world), lay_out("root", specs)
    assert [place.offset for place in layout.places] == [place.offset for place in alone.places]
    covered = [0] * len(specs)
    for rank in range(world):
        for number, start, stop, span, offset, grad_offset in layout.stretches(rank):
            size, place = specs[number].dtype.itemsize, layout.places[number]
            assert start == covered[number] and start % CUT_NUMEL == 0 and start < stop
            assert rank * layout.spans[span].shard_nbytes + offset == place.offset + start * size
            assert offset + (stop - start) * size <= layout.spans[span].shard_nbytes
            assert (grad_offset < 0) == (place.grad_offset < 0)
            covered[number] = stop
    assert covered == [spec.numel for spec in specs]
    assert all(span.nbytes == world * span.shard_nbytes for span in layout.spans)
    assert all(span.shard_nbytes % PAGE_NBYTES == 0 for span in layout.spans)
    assert layout.shard_nbytes * world == layout.nbytes


@pytest.mark.parametrize("name", ["gpt", "mixed_dtypes", "frozen_part", "units_of_one_layer"])
@pytest.mark.parametrize("hold", ["auto", 0, 70_000])
def test_shares_add_up_to_the_budget(name: str, hold: str | int) -> None:
    layouts = layouts_of(CASES[name], None)
    smallest = share_out(layouts, work_sizes(layouts), 0, held=0).smallest
    for beyond in (70_000, 200_000, 1 << 20, 1 << 30):
        shares = share_out_as_asked(layouts, smallest + beyond, hold)
        parts = (shares.held, shares.window, shares.gathered, shares.gradients, shares.update, shares.activations)
        assert min(parts) >= 0 and sum(parts) == smallest + beyond
        assert shares.smallest == smallest and shares.spare == beyond - shares.held
    at_least = share_out(layouts, work_sizes(layouts), smallest)
    assert (at_least.held, at_least.spare) == (0, 0)
