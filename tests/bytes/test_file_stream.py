"""Files of the user's own are written and read to the byte, at any alignment, and a failure names the file."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tiered.bytes import file_stream
from tiered.bytes.file_stream import PIECE_NBYTES, FileMemory, FileReader, FileWriter
from tiered.errors import CapacityError, DeviceError

SIZES = (0, 1, 4095, 4096, 4097, PIECE_NBYTES - 1, PIECE_NBYTES, 3 * PIECE_NBYTES + 5001)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_in_parts_is_the_file(nbytes: int, drive_path: Path) -> None:
    rng = random.Random(nbytes)
    content = rng.randbytes(nbytes)
    path = drive_path / "file"
    with FileWriter(str(path), nbytes) as file:
        place = 0
        while place < nbytes:
            part = bytearray(content[place : place + rng.choice((1, 4096, 100_000, 2 * PIECE_NBYTES))])
            file.write(memoryview(part))
            place += len(part)
            part[:] = bytes(len(part))  # the caller's again
        file.finish()
    assert path.read_bytes() == content


def test_any_range_is_read_into_memory_of_any_alignment(drive_path: Path) -> None:
    rng = random.Random(1)
    content = rng.randbytes(3 << 20)
    (drive_path / "file").write_bytes(content)
    reader = FileReader(str(drive_path / "file"))
    memory = bytearray((3 << 20) + 64)
    for _ in range(40):
        start, skip = rng.randrange(len(content)), rng.choice((0, 0, 1, 64))
        start -= rng.choice((0, start % 4096))
        nbytes = rng.choice((0, 1, 5000, 4096, 1 << 20, len(content))) % (len(content) - start + 1)
        reader.begin(start, memoryview(memory)[skip : skip + nbytes])()
        assert memory[skip : skip + nbytes] == content[start : start + nbytes]
    waits = [reader.begin(n << 20, memoryview(memory)[n << 20 : (n + 1) << 20]) for n in range(3)]
    for wait in waits:
        wait()
    assert memory[: 3 << 20] == content
    with pytest.raises(EOFError, match=r"file ends at byte"):
        reader.begin(len(content) - 10, memoryview(memory)[:100])()
    reader.close()
    reader.close()


def test_errors_name_the_file(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"cannot open .*none"):
        FileReader(str(drive_path / "none"))
    (drive_path / "there").touch()
    with pytest.raises(DeviceError, match=r"cannot create .*there"):
        FileWriter(str(drive_path / "there"), 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match=r"cannot allocate .* for .*file"):
            FileWriter(str(drive_path / "file"), 1 << 20)
        with pytest.raises(CapacityError, match="has no room for"):
            FileMemory(str(drive_path), [4096])
    with monkeypatch.context() as patch:
        patch.setattr(file_stream.os, "pwrite", full)
        with (
            FileWriter(str(drive_path / "other"), 10) as file,
            pytest.raises(CapacityError, match=r"cannot write .*other"),
        ):
            file.write(memoryview(b"0123456789"))
            file.finish()
