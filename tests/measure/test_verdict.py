"""The arithmetic of advice, by known figures."""

from __future__ import annotations

import pytest

from tiered.tools.bench.report import (
    Bandwidth,
    BenchRow,
    Best,
    ComputeDeviceReport,
    best_of,
    compute_verdict_of,
    duplex_of,
    verdict_of,
)
from tiered.units import KiB, MiB

DRIVE = Bandwidth(2.8e9, 4e9, 1.0)


def row(
    op: str, block_bytes: int, gb_per_s: float, *, depth: int | None = None, beside: float | None = None
) -> BenchRow:
    return BenchRow.of(op, block_bytes, "", [gb_per_s], "fio", [beside] if beside else [], depth=depth)


def best(**changes: object) -> Best:
    given: dict[str, object] = dict(
        block_bytes=4 * MiB,
        read_depth=8,
        write_depth=8,
        read_gb_per_s=3.5,
        write_gb_per_s=6.0,
        read_ratio_to_fio=1.0,
        write_ratio_to_fio=1.0,
    )
    return Best(**{**given, **changes})  # type: ignore[arg-type]


def test_the_best_is_the_fastest_block_with_the_fewest_bytes_in_flight() -> None:
    found = best_of(
        [
            row("read", MiB, 2.0, depth=8),
            row("write", MiB, 4.0, depth=8),
            row("read", 4 * MiB, 3.5, depth=4, beside=7.0),
            row("read", 4 * MiB, 3.55, depth=8),  # not 3 % better than 4 in flight
            row("write", 4 * MiB, 5.0, depth=4),
            row("write", 4 * MiB, 6.0, depth=8, beside=6.0),
            row("read", 8 * MiB, 3.6, depth=4),  # nor is a block twice as long
            row("write", 8 * MiB, 6.1, depth=8),
            row("read", 128 * KiB, 9.0, depth=8),  # no write was measured
        ]
    )
    assert found == best(read_depth=4, read_ratio_to_fio=0.5)


@pytest.mark.parametrize(
    ("read", "write", "duplex"),
    [
        (2.0, 2.0, 0.0),  # half of each: they share the drive
        (4.0, 4.0, 1.0),  # all of both: neither slows the other
        (3.0, 3.0, 2 / 3),
        (1.6, 1.6, -0.5),  # worse than one after the other
        (1.0, 1.0, -1.0),  # but no worse than that counts
        (0.0, 4.0, 0.0),
    ],
)
def test_duplex(read: float, write: float, duplex: float) -> None:
    assert duplex_of(read, write, 4.0, 4.0) == pytest.approx(duplex)


class TestVerdict:
    def test_one_line_for_people(self) -> None:
        assert verdict_of([best()], [DRIVE]) == (
            "read 3.5 GB/s, write 6.0 GB/s with 4 MiB x 8 (tensors, which no cache holds, 2.8 and 4.0): swapping 1 B "
            "parameters in and out of this drive takes 5.0 s a step (14 bytes of each read and 12 written at 5.2 GB/s "
            "in sum: bf16 with exact AdamW, none of it held in DRAM); fio reaches the same"
        )

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"read_ratio_to_fio": 0.8, "write_ratio_to_fio": 1.0}, "fio reads 25 % more and writes the same"),
            ({"read_ratio_to_fio": 1.25, "write_ratio_to_fio": 1.25}, "fio reaches 20 % less"),
            ({"read_ratio_to_fio": None, "write_ratio_to_fio": None}, "fio is not installed"),
            ({"write_depth": 32}, "4 MiB x 8 reading, 32 writing"),
        ],
    )
    def test_what_is_said_of_fio_and_settings(self, changes: dict[str, object], says: str) -> None:
        assert says in verdict_of([best(**changes)], [DRIVE])

    def test_a_fio_without_figures_is_not_called_missing(self) -> None:
        unknown = best(read_ratio_to_fio=None, write_ratio_to_fio=None)
        assert verdict_of([unknown], [DRIVE], has_fio=True).endswith("fio did not work, so there is no reference")

    def test_several_drives(self) -> None:
        together = [row("put", MiB, 12.0), row("get", MiB, 7.0)]
        found = verdict_of([best(), best(block_bytes=MiB)], [DRIVE, Bandwidth(1.0, 1.0, 0.0)], together)
        assert "read 7.0 GB/s, write 12.0 GB/s with each at its own best (a store over all of them)" in found
        assert "these 2 drives takes 3.0 s" in found

    def test_a_compute_device_has_a_part_of_the_line(self) -> None:
        swap = BenchRow.of("3 tiers", MiB, "", [5.21], "bound", [5.961])
        found = ComputeDeviceReport("cuda:0", "cuda", None, Bandwidth(25.12e9, 24.06e9, 0.9), 0.99, swap)
        assert compute_verdict_of(found) == (
            "copies to cuda:0 run at 25.1 GB/s and from it at 24.1, torch reaches the same; all three tiers at once "
            "move 5.2 GB/s, 87 % of min(PCIe, NVMe)"
        )
