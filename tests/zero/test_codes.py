"""Codes of exact masters: every fp32 comes back from its bf16 and its remainder."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiered.zero.formats.codes import MarkedRemainder, Remainder
from tiered.zero.formats.tile_scratch import Dither, Rows, TileScratch

NUMEL = 70 * 1024 + 5  # more rows with ties than are mended at once, and a part of one
SPECIAL = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00018000, 0x007FFFFF, 0x00800000, 0x80808000,  # subnormals
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF,  # infinity, NaN
    0x7F808000, 0xFF808000, 0x7FC08000, 0xFFFE8000,  # NaN whose low half is a tie
    0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF,  # round to infinity, or just not
    0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0x3F808001,  # ties above an even and an odd half
]  # fmt: skip

Code = Remainder | MarkedRemainder
Marks = Literal["signs", "bitmap"]
CODES: dict[Marks, Code] = {"signs": Remainder(), "bitmap": MarkedRemainder()}

every_code = pytest.mark.parametrize("marks", CODES)


def rows_for(numel: int) -> Rows:
    """Return scratch with bytes of no meaning in it."""
    numel = (numel // 1024 + 1) * 1024
    scratch = TileScratch(torch.full((TileScratch.nbytes(numel),), 0xA5, dtype=torch.uint8), numel)
    return scratch.rows(small=False)


def round_trip(code: Code, masters: Tensor, fields: Sequence[Tensor]) -> Tensor:
    """Return ``masters`` (numel,) fp32 after encode and decode, and check that the bf16 is torch's rounding."""
    rows = rows_for(masters.numel())
    hi = torch.empty(masters.numel(), dtype=torch.bfloat16)
    rows.master[: masters.numel()] = masters
    code.encode(hi, fields, rows, Dither(torch.empty(0)))
    assert torch.equal(hi.view(torch.int16), masters.bfloat16().view(torch.int16))
    rows.master.zero_()
    return code.decode(hi, fields, rows).clone()


def fields_for(marks: Marks, numel: int) -> list[Tensor]:
    if marks == "signs":
        return [torch.empty(numel, dtype=torch.int16), torch.rand(numel)]
    return [torch.empty(numel, dtype=torch.int16), torch.empty(-(-numel // 8), dtype=torch.uint8)]


def bits(kind: str) -> Tensor:
    """Return (NUMEL,) int32: random bits, some of them or all of them ties."""
    random = torch.randint(-(1 << 31), 1 << 31, (NUMEL,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ties = (random & ~0xFFFF) | 0x8000
    if kind == "a tie in a thousand":
        return torch.where(torch.arange(NUMEL) % 1000 == 999, ties, random)
    return ties if kind == "all ties" else random


@pytest.mark.parametrize("kind", ["random", "a tie in a thousand", "all ties"])
@every_code
def test_every_master_comes_back(marks: Marks, kind: str) -> None:
    check_that_masters_come_back(marks, bits(kind).view(torch.float32))


def check_that_masters_come_back(marks: Marks, masters: Tensor) -> None:
    fields = fields_for(marks, masters.numel())
    before = fields[1].clone()
    found = round_trip(CODES[marks], masters, fields)
    real = ~masters.isnan()
    assert torch.equal(found[real].view(torch.int32), masters[real].view(torch.int32))
    assert found[~real].isnan().all()  # without its payload
    if marks == "signs":
        assert torch.equal(fields[1], before)  # the moment is as it was


@every_code
def test_a_cleared_remainder_is_nothing(marks: Marks) -> None:
    code = CODES[marks]
    fields = fields_for(marks, NUMEL)
    masters = bits("all ties").view(torch.float32).nan_to_num()
    round_trip(code, masters, fields)
    hi = masters.bfloat16()
    rows = rows_for(NUMEL)
    rows.master[:NUMEL] = masters
    code.encode(hi, fields, rows, Dither(torch.empty(0)))
    code.clear(fields)
    assert torch.equal(code.decode(hi, fields, rows), hi.float())


@st.composite
def drawn_bits(draw: st.DrawFn) -> Tensor:
    """Draw (numel,) bits of fp32 at the edges of rows and bytes: any bits, ties, special ones."""
    numel = max(1, 1024 * draw(st.integers(0, 3)) + draw(st.integers(-9, 9)) + draw(st.sampled_from([0, 512])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    drawn = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32)
    every = draw(st.sampled_from([0, 1, 7, 1000]))  # 0: a row may have no tie at all
    if every:
        drawn[::every] = (drawn[::every] & ~0xFFFF) | 0x8000
    for position, value in draw(st.lists(st.tuples(st.integers(0, numel - 1), st.sampled_from(SPECIAL)), max_size=8)):
        drawn[position] = value - (value >> 31 << 32)
    return drawn


@every_code
@settings(max_examples=100)
@given(drawn=drawn_bits())
def test_masters_of_any_number_come_back(marks: Marks, drawn: Tensor) -> None:
    check_that_masters_come_back(marks, drawn.view(torch.float32))
