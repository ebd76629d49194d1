"""Unaligned bytes of a file, read through aligned ranges of it and copied out."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bytes.moving import Batch
from tiered.bytes.arena import Buffer
from tiered.bytes.device.aligned_range import aligned_range, aligned_ranges
from tiered.bytes.device.engines import open_external

PAGE = 4096


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from([4096, 8192]))
def test_a_range_is_the_smallest_aligned_one(offset: int, nbytes: int, alignment: int) -> None:
    found = aligned_range(offset, nbytes, alignment)
    assert found.offset % alignment == found.nbytes % alignment == 0 and found.wanted == nbytes
    assert found.offset + found.skip == offset and 0 <= found.skip < alignment
    assert found.skip + nbytes <= found.nbytes < found.skip + nbytes + alignment or found.nbytes == nbytes == 0


def test_any_bytes_that_are_copied_out_are_those_of_the_file(tmp_path: Path, buffer: Buffer) -> None:
    content = os.urandom(10 * PAGE + 1234)
    (tmp_path / "file").write_bytes(content)
    with closing(open_external([tmp_path / "file"])) as device:
        batch = Batch(device)

        @given(st.data(), st.integers(1, buffer.nbytes // PAGE))
        def check(data: st.DataObject, num_pages: int) -> None:
            offset = data.draw(st.integers(0, len(content)))
            nbytes = data.draw(st.integers(0, len(content) - offset))
            destination = bytearray(nbytes + 1)  # unaligned in it
            end = 0
            for place, found in aligned_ranges(
                offset, nbytes, alignment=device.alignment, most_nbytes=num_pages * PAGE
            ):
                assert end <= found.offset and found.nbytes <= num_pages * PAGE
                end = found.offset + found.nbytes
                memory = buffer.memory[: found.nbytes]
                device.submit([batch.operation("read", memory, found.offset)])
                assert batch.wait(1)[0].error is None
                found.copy_out(memory, memoryview(destination)[1 + place : 1 + place + found.wanted])
            assert destination[1:] == content[offset : offset + nbytes] and end <= device.files()[0]

        check()


def test_scratch_memory_is_of_whole_blocks() -> None:
    for most_nbytes in (0, 100, PAGE + 1):
        with pytest.raises(ValueError, match="multiple of 4096"):
            list(aligned_ranges(0, 10, alignment=PAGE, most_nbytes=most_nbytes))
