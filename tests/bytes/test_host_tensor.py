"""New memory: aligned, of the right size, alive as long as anybody uses it; and copies to and from buffers."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from tiered.bytes.arena import Arena
from tiered.bytes.host_tensor import copy_contiguous, empty_aligned
from tiered.units import KiB, MiB


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MiB + 3])
def test_a_new_tensor_is_aligned_and_its_memory_rounded_up(nbytes: int) -> None:
    tensor, memory = empty_aligned(nbytes, 16 * KiB)
    assert (tensor.dtype, tensor.shape, tensor.storage_offset()) == (torch.uint8, (nbytes,), 0)
    assert tensor.untyped_storage().nbytes() == nbytes
    assert tensor.data_ptr() % (2 * MiB) == 0
    assert len(memory) == -(-nbytes // (16 * KiB)) * 16 * KiB
    assert not tensor.any()
    memory[:1] = b"\x07"
    assert tensor[0] == 7
    del memory
    tensor.fill_(5)
    assert tensor.view(-1)[-1] == 5


def test_the_pages_go_with_the_last_reference() -> None:
    tensor, memory = empty_aligned(4096, 4096)
    pages = weakref.ref(memory.obj)
    assert isinstance(memory.obj, mmap.mmap)
    del tensor
    gc.collect()
    assert pages() is not None
    del memory
    gc.collect()
    assert pages() is None


def test_copies_go_both_ways() -> None:
    arena = Arena(1 * MiB)
    buffer = arena.allocate_nowait(8192)
    assert buffer is not None
    source, target = torch.arange(250, dtype=torch.uint8), torch.zeros(250, dtype=torch.uint8)
    copy_contiguous(buffer, source, to_buffer=True)
    copy_contiguous(buffer, target, to_buffer=False)
    assert torch.equal(source, target)
    arena.release(buffer)
    arena.close()
