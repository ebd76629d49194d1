"""Large copies: every byte, none beside it, whatever the addresses; and libc's where no code can be made."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch

from tiered.bytes import bulk_copy
from tiered.bytes.bulk_copy import copy_bytes
from tiered.units import MiB

GUARD = 128


@pytest.mark.parametrize("nbytes", [0, 1, 4 * MiB - 1, 4 * MiB, 4 * MiB + 15, 9 * MiB + 63])
@pytest.mark.parametrize(("to", "of"), [(0, 0), (1, 0), (0, 3), (15, 15), (16, 5)])
def test_all_bytes_are_copied_and_no_others(nbytes: int, to: int, of: int) -> None:
    source = torch.randint(0, 256, (nbytes + of,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    target = torch.full((nbytes + to + 2 * GUARD,), 7, dtype=torch.uint8)
    copy_bytes(target.data_ptr() + GUARD + to, source.data_ptr() + of, nbytes)
    assert torch.equal(target[GUARD + to : GUARD + to + nbytes], source[of:])
    assert (target[: GUARD + to] == 7).all() and (target[GUARD + to + nbytes :] == 7).all()


def test_where_no_code_can_be_made_libc_copies_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(code: bytes) -> None:
        raise PermissionError(13, "mprotect refused")

    monkeypatch.setattr(bulk_copy, "_load", refuse)
    monkeypatch.setattr(bulk_copy.platform, "machine", lambda: "x86_64")
    bulk_copy._streaming_copy.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "tiered"):
            for nbytes in (5 * MiB, 6 * MiB):
                source, target = torch.arange(nbytes, dtype=torch.int64).byte(), torch.zeros(nbytes, dtype=torch.uint8)
                copy_bytes(target.data_ptr(), source.data_ptr(), nbytes)
                assert torch.equal(source, target)
        assert bulk_copy._streaming_copy() is ctypes.memmove
        assert len(caplog.records) == 1 and "mprotect refused" in caplog.text
    finally:
        bulk_copy._streaming_copy.cache_clear()


def test_other_processors_have_libc_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_copy.platform, "machine", lambda: "aarch64")
    bulk_copy._streaming_copy.cache_clear()
    try:
        assert bulk_copy._streaming_copy() is ctypes.memmove
    finally:
        bulk_copy._streaming_copy.cache_clear()
