"""Codes of masters: every fp32 comes back from its bf16 and its remainder, whatever its bits are."""

from collections.abc import Sequence

import pytest
import torch

from tiered.zero.codes import MarkedRemainder, MasterCode, Remainder
from tiered.zero.tile_scratch import Dither, TileScratch

NUMEL = 70 * 1024 + 5  # more rows with ties than are mended at once, and a part of one


def round_trip(code: MasterCode, masters: torch.Tensor, fields: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``masters`` (numel,) fp32 after encode and decode, and check that the bf16 is torch's rounding."""
    numel = (masters.numel() // 1024 + 1) * 1024
    scratch = TileScratch(torch.zeros(TileScratch.nbytes(numel) // 4), numel)
    rows = scratch.rows(small=False)
    hi = torch.empty(masters.numel(), dtype=torch.bfloat16)
    rows.master[: masters.numel()] = masters
    code.encode(hi, fields, rows, Dither(torch.empty(0)))
    assert torch.equal(hi.view(torch.int16), masters.bfloat16().view(torch.int16))
    rows.master.zero_()
    return code.decode(hi, fields, rows).clone()


def remainder_fields(numel: int) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=torch.int16), torch.rand(numel)]


def bitmap_fields(numel: int) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=torch.int16), torch.empty(-(-numel // 8), dtype=torch.uint8)]


CODES = {"remainder": (Remainder(), remainder_fields), "bitmap": (MarkedRemainder(), bitmap_fields)}


def bits(kind: str) -> torch.Tensor:
    """Return (NUMEL,) int32: random bits, some of them or all of them ties."""
    random = torch.randint(-(1 << 31), 1 << 31, (NUMEL,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ties = (random & ~0xFFFF) | 0x8000
    if kind == "a tie in a thousand":
        return torch.where(torch.arange(NUMEL) % 1000 == 999, ties, random)
    return ties if kind == "all ties" else random


@pytest.mark.parametrize("kind", ["random", "a tie in a thousand", "all ties"])
@pytest.mark.parametrize("name", CODES)
def test_every_master_comes_back(name: str, kind: str) -> None:
    code, fields_of = CODES[name]
    masters = bits(kind).view(torch.float32)
    fields = fields_of(NUMEL)
    before = fields[1].clone()
    found = round_trip(code, masters, fields)
    real = ~masters.isnan()
    assert torch.equal(found[real].view(torch.int32), masters[real].view(torch.int32))
    assert found[~real].isnan().all()  # without its payload
    if name == "remainder":
        assert torch.equal(fields[1], before)  # the moment is as it was


@pytest.mark.parametrize("name", CODES)
def test_a_cleared_remainder_is_nothing(name: str) -> None:
    code, fields_of = CODES[name]
    fields = fields_of(NUMEL)
    masters = bits("all ties").view(torch.float32).nan_to_num()
    round_trip(code, masters, fields)
    hi = masters.bfloat16()
    scratch = TileScratch(torch.zeros(TileScratch.nbytes(71 * 1024) // 4), 71 * 1024)
    rows = scratch.rows(small=False)
    rows.master[:NUMEL] = masters
    code.encode(hi, fields, rows, Dither(torch.empty(0)))
    code.clear(fields)
    assert torch.equal(code.decode(hi, fields, rows), hi.float())
