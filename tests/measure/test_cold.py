"""Cold reads: what proves them, and what the page cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiered.doctor.mount import find_mount
from tiered.measure.cold import ColdProof, forget, resident_pages


class TestCold:
    def proof(self, **changes: object) -> ColdProof:
        given: dict[str, object] = dict(
            is_direct=True, nbytes=10**9, num_pages=10, num_resident_pages=0, process_nbytes=10**9, disk_nbytes=10**9
        )
        return ColdProof(**{**given, **changes})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("changes", "is_cold"),
        [
            ({}, True),
            ({"disk_nbytes": None}, True),
            ({"disk_nbytes": 2 * 10**9}, True),  # others read too
            ({"process_nbytes": None, "disk_nbytes": None}, False),
            ({"process_nbytes": 9 * 10**8}, False),
            ({"disk_nbytes": 0}, False),
            ({"num_resident_pages": 1}, False),
            ({"is_direct": False, "num_resident_pages": 10}, True),  # what was read stays there
            ({"is_direct": False, "num_resident_pages": 10, "process_nbytes": 0}, False),
        ],
    )
    def test_what_counts_as_proof(self, changes: dict[str, object], is_cold: bool) -> None:
        assert self.proof(**changes).is_cold is is_cold

    def test_resident_pages_are_seen(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(bytes(8 * 4096))
        assert resident_pages(str(file), 8 * 4096) == 8
        forget(str(file))
        mount = find_mount(tmp_path)
        is_memory = mount is not None and mount.kind == "memory"  # where the page cache is all there is
        assert resident_pages(str(file), 8 * 4096) == (8 if is_memory else 0)
