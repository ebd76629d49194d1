"""Unaligned bytes of a file, read through aligned ranges of it and copied out."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.bytes.moving import Batch
from tiered.bytes.arena import Buffer
from tiered.bytes.device.engines import open_external
from tiered.store.transfers.external_read import aligned_range

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

        @given(st.data())
        def check(data: st.DataObject) -> None:
            offset = data.draw(st.integers(0, len(content)))
            nbytes = data.draw(st.integers(0, min(len(content) - offset, buffer.nbytes - 2 * PAGE)))
            destination = bytearray(nbytes + 1)  # unaligned in it
            found = aligned_range(offset, nbytes, device.alignment)
            if nbytes:
                memory = buffer.memory[: found.nbytes]
                device.submit([batch.operation("read", memory, found.offset)])
                assert batch.wait(1)[0].error is None
                found.copy_out(memory, memoryview(destination)[1:])
            assert destination[1:] == content[offset : offset + nbytes]
            assert found.offset + found.nbytes <= device.files()[0]

        check()
