"""`tiered import`: safetensors files into a store of their tensors, under their own names."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.units import MiB, format_bytes
from tiered.zero.deferred_files import DeferredFiles, safetensors_files
from tiered.zero.deferred_tensor import DeferredTensor

__all__ = ["import_files"]

_LEAST_DRAM_NBYTES = 256 * MiB
_SMALL_FILES = ("config.json", "generation_config.json")


def import_files(source: Path, run: Path) -> int:
    """Put the tensors of ``source``, a safetensors file or a folder, into a new store in ``run``; print and return 0.

    Each is a key of its own name, with its dtype and shape, and ``store["name"]`` reads it. All are in one commit, the
    last act: an import that was interrupted leaves nothing committed, and the next begins again. DRAM takes the two
    largest tensors. Blocks. Raises UsageError for files that are no sound ones, and where ``run`` holds a commit.
    """
    paths = safetensors_files(source, "import ")
    with closing(DeferredFiles(paths)) as files:
        tensors = files.tensors()
        sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in tensors.items()}
        with Store(run, dram=_LEAST_DRAM_NBYTES + 2 * max(sizes.values(), default=0), device_memory=0) as store:
            if store.generation:
                raise UsageError(f"{run} holds a run of generation {store.generation}: name a new directory")
            store.reserve_space(sum(sizes.values()))
            for name, tensor in tensors.items():
                _put(store, name, tensor)
            folder = source if source.is_dir() else source.parent
            small = {name: folder / name for name in _SMALL_FILES if (folder / name).is_file()}
            store.commit({"files": {name: path.read_text(encoding="utf-8") for name, path in small.items()}})
    print(f"{len(tensors)} tensors, {format_bytes(sum(sizes.values()))}, in {run}")
    return 0


def _put(store: Store, name: str, tensor: DeferredTensor) -> None:
    """Read a tensor straight into the store's memory, from where it goes out while the next is read."""
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if not nbytes:
        store[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return
    store.working_set.create(name, nbytes, dtype=tensor.dtype, shape=tuple(tensor.shape))
    lease = store.working_set.lease(name, "w")
    try:
        lease.tensor.copy_(tensor)
    finally:
        lease.release()
    store.working_set.swap_out([name])
