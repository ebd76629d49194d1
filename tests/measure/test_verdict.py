"""The arithmetic of advice, by known figures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tiered.tools.bench.report import (
    Best,
    ComputeDeviceReport,
    CopyRow,
    LinkRates,
    SwapRates,
    best_of,
    compute_verdict_of,
    duplex_of,
    spread,
    step_seconds,
    verdict_of,
)
from tiered.units import KiB, MiB


@dataclass(frozen=True)
class Figured:
    op: str
    block_bytes: int
    depth: int
    gb_per_s: float
    read_gb_per_s: float = 0.0
    write_gb_per_s: float = 0.0
    ratio_to_fio: float | None = None


def best(**changes: object) -> Best:
    given: dict[str, object] = dict(
        block_bytes=4 * MiB,
        read_depth=8,
        write_depth=8,
        read_gb_per_s=3.5,
        write_gb_per_s=6.0,
        duplex=0.0,
        read_ratio_to_fio=1.0,
        write_ratio_to_fio=1.0,
    )
    return Best(**{**given, **changes})  # type: ignore[arg-type]


class TestBest:
    def test_the_fastest_block_with_the_fewest_bytes_in_flight(self) -> None:
        found = best_of(
            [
                Figured("read", MiB, 8, 2.0),
                Figured("write", MiB, 8, 4.0),
                Figured("read", 4 * MiB, 4, 3.5, ratio_to_fio=1.01),
                Figured("read", 4 * MiB, 8, 3.55),  # not 3 % better than 4 in flight
                Figured("write", 4 * MiB, 4, 5.0),
                Figured("write", 4 * MiB, 8, 6.0, ratio_to_fio=0.98),
                Figured("read", 8 * MiB, 4, 3.6),  # nor is a block twice as long
                Figured("write", 8 * MiB, 8, 6.1),
                Figured("read", 128 * KiB, 8, 9.0),  # no write was measured
                Figured("mixed", 4 * MiB, 8, 7.125, read_gb_per_s=2.625, write_gb_per_s=4.5),  # 3/4 of each alone
            ]
        )
        duplex = pytest.approx(2 / 3)
        assert found == best(read_depth=4, duplex=duplex, read_ratio_to_fio=1.01, write_ratio_to_fio=0.98)

    @pytest.mark.parametrize(
        ("read", "write", "duplex"),
        [
            (2.0, 2.0, 0.0),  # half of each: they share the drive
            (4.0, 4.0, 1.0),  # all of both: neither slows the other
            (3.0, 3.0, 2 / 3),
            (1.0, 1.0, 0.0),  # worse than one after the other counts as that
            (0.0, 4.0, 0.0),
        ],
    )
    def test_duplex(self, read: float, write: float, duplex: float) -> None:
        assert duplex_of(read, write, 4.0, 4.0) == pytest.approx(duplex)


class TestVerdict:
    def test_seconds_of_a_step(self) -> None:
        for duplex, seconds in ((0.0, 4.0 + 2.0), (1.0, 4.0), (0.5, 4.0 + 1.0)):
            assert step_seconds(3.5, 6.0, duplex=duplex) == pytest.approx(seconds)

    def test_one_line_for_people(self) -> None:
        assert verdict_of([best()]) == (
            "read 3.5 GB/s, write 6.0 GB/s with 4 MiB x 8: swapping 1 B parameters in and out of this drive takes "
            "6.0 s a step (14 bytes of each read, 12 written: bf16 with exact AdamW, none of it held in DRAM); fio "
            "reaches the same"
        )

    def test_a_step_takes_as_long_as_tensors_do(self) -> None:
        found = verdict_of([best()], swapping=[SwapRates(256 * MiB, 2.8, 4.0, duplex=1.0)])
        assert found.startswith(
            "read 3.5 GB/s, write 6.0 GB/s with 4 MiB x 8 (tensors, which no cache holds, 2.8 and 4.0): swapping 1 B"
        )
        assert "takes 5.0 s a step" in found
        both = [SwapRates(256 * MiB, 1.0, 1.0, duplex=0.0)] * 2
        together = [Figured("put", MiB, 16, 12.0), Figured("get", MiB, 16, 7.0)]
        assert "takes 3.0 s a step" in verdict_of([best(), best()], together, swapping=both)

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
        assert says in verdict_of([best(**changes)])

    def test_a_fio_without_figures_is_not_called_missing(self) -> None:
        unknown = best(read_ratio_to_fio=None, write_ratio_to_fio=None)
        assert verdict_of([unknown], has_fio=True).endswith("fio did not work, so there is no reference")

    def test_several_drives(self) -> None:
        together = [Figured("put", MiB, 16, 12.0), Figured("get", MiB, 16, 7.0)]
        found = verdict_of([best(), best(block_bytes=MiB)], together)
        assert "read 7.0 GB/s, write 12.0 GB/s with each at its own best" in found
        assert "these 2 drives takes 3.0 s" in found

    @pytest.mark.parametrize(("ratios", "says"), [([1.0, 0.98, 0.99], "the same"), ([0.5], "100 % more")])
    def test_a_compute_device_has_a_part_of_the_line(self, ratios: list[float], says: str) -> None:
        copies = [
            CopyRow(
                op="copy in",
                block_bytes=1,
                in_bytes=1,
                out_bytes=0,
                torch_gb_per_s=(1.0,),
                ratio_to_torch=each,
                **spread([1.0]),
            )
            for each in ratios
        ]
        swap = TierSwap(gb_per_s=5.21, ratio_to_bound=0.874)
        link = LinkRates(25.12, 24.06, 0.9)
        assert compute_verdict_of(ComputeDeviceReport("cuda:0", "cuda", None, copies, link, swap)) == (
            f"copies to cuda:0 run at 25.1 GB/s and from it at 24.1, torch reaches {says}; all three tiers at once "
            "move 5.2 GB/s, 87 % of min(PCIe, NVMe)"
        )


@dataclass(frozen=True)
class TierSwap:
    """The figures of a swap that the verdict says."""

    gb_per_s: float
    ratio_to_bound: float
