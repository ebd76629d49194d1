"""`tiered export` and `tiered import`: a committed run to safetensors files, without its program; files to a store."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.interop.checkpoint_folder import holds_checkpoint, write_checkpoint
from tiered.interop.saving import cast
from tiered.store.generations.registry import taking_apart
from tiered.store.residency.residency import Lease
from tiered.store.store import Store
from tiered.tools.console import confirm
from tiered.units import MiB, format_bytes, parse_bytes
from tiered.zero.deferred_tensors import DeferredFiles, DeferredTensor, safetensors_files
from tiered.zero.layout import SegmentSpec, UnitLayout, committed_layouts
from tiered.zero.model_state import refuse_missing

__all__ = ["export", "import_files"]

_LEAST_DRAM_NBYTES = 64 * MiB
_LEAST_IMPORT_DRAM_NBYTES = 256 * MiB
_SMALL_FILES = ("config.json", "generation_config.json")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(
    run: Sequence[Path],
    folder: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "50GB",
    external: Sequence[Path] = (),
    yes: bool = False,
) -> int:
    """Write the last commit of the run in ``run`` to ``folder``, print where, and return 0; blocks.

    A training run gives its model's parameters and buffers, and config.json where it trained one of Hugging Face. Any
    other store gives each tensor under its key. ``external`` are the user's own files that some of it lies in. DRAM
    takes the largest key. Raises UsageError where there is no commit, while a program has the run open for writing, and
    where ``folder`` holds a checkpoint that may not be replaced; CapacityError, DeviceError.
    """
    parse_bytes(max_shard_size)
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    missing = [path for path in run if not path.is_dir()]
    if missing:
        raise UsageError(f"no run in {', '.join(map(str, missing))}")
    largest = _largest_key(run, external)
    if holds_checkpoint(folder):
        confirm(
            f"{folder} holds a checkpoint: replace it?",
            unasked=f"{folder} holds a checkpoint and there is no terminal to ask on: add --yes or name another",
            declined="nothing was written",
            yes=yes,
        )
    with (
        _opened(run, external, _LEAST_DRAM_NBYTES + largest) as store,
        closing(CommittedTensors(store)) as committed,
    ):
        paths = _write(folder, committed, dtype, max_shard_size)
        num_tensors, generation = len(committed.tensors), store.generation
    nbytes = sum(path.stat().st_size for path in paths)
    print(f"{num_tensors} tensors of generation {generation}, {format_bytes(nbytes)} in {len(paths)} files: {folder}")
    return 0


def _opened(run: Sequence[Path], external: Sequence[Path], dram: int) -> Store:
    """Open the committed run to be read."""
    return Store(*run, dram=dram, mode="r", external=external, device_memory=0)


def _largest_key(run: Sequence[Path], external: Sequence[Path]) -> int:
    """Return the bytes of the largest key. Raises UsageError where nothing was committed."""
    with _opened(run, external, _LEAST_DRAM_NBYTES) as store:
        if not store.generation:
            raise UsageError(f"nothing was committed in {', '.join(map(str, run))} yet")
        is_run = store.registered_state("tiered.model") is not None
        names = [record for record in store.records() if record.name.startswith("model/parameters/") or not is_run]
        return max((record.nbytes for record in names), default=0)


def _write(folder: Path, committed: CommittedTensors, dtype: str | None, max_shard_size: str) -> list[Path]:
    def write_others(temporary: Path) -> None:
        for name, text in committed.files.items():
            if name == "config.json" and dtype:
                text = _config(json.loads(text) | {"dtype": str(_DTYPES[dtype]).removeprefix("torch.")})
            (temporary / Path(name).name).write_text(text, encoding="utf-8")

    tensors = cast(committed.tensors, _DTYPES[dtype] if dtype else None)
    return write_checkpoint(
        folder, tensors, max_shard_size=max_shard_size, write_others=write_others, metadata=committed.tied
    )


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
        with Store(run, dram=_LEAST_IMPORT_DRAM_NBYTES + 2 * max(sizes.values(), default=0), device_memory=0) as store:
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


class CommittedTensors:
    """The tensors of a store's last commit by name, deferred, read without the program that made them.

    A training run gives its model's parameters and persistent buffers, for which one key at a time is leased; a tied
    parameter has its first name, and ``tied`` has the others. Any other store gives each tensor under its key.
    ``files`` are the texts of a Hugging Face model's small files by name.
    """

    def __init__(self, store: Store) -> None:
        """Raises UsageError for a state that is no model's, and for a model that lacks some of its keys."""
        state = store.registered_state("tiered.model")
        self._store = store
        self._lease: Lease | None = None
        self._leased = ""  # the key of ``_lease``
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        if state is None:
            self.files: dict[str, str] = dict(store.state.get("files", {}))
            self._add_plain_tensors()
            return
        if (world := state.get("world", 1)) != 1:  # an earlier release knew one rank alone
            raise UsageError(
                f"the store holds one rank's shards of a model over {world} ranks; expected model.state_dict(), by all"
                " ranks together, of the run that resumes it"
            )
        with taking_apart("tiered.model", by="model"):
            layouts = [layout for _, layout in committed_layouts(state)]
            for layout in layouts:
                self._add(layout)
            persistent = set(state.get("persistent", state["buffers"]))
            self.tensors |= {name: each for name, each in state["buffers"].items() if name in persistent}
            self.tensors |= dict(state.get("added", {}))
            self.tied = dict(state.get("tied", {}))
            self.files = _files(state)
        refuse_missing(store, (span.key for layout in layouts for span in layout.spans))

    def _add_plain_tensors(self) -> None:
        for record in self._store.records():
            looks = torch.empty(record.shape, dtype=record.dtype, device="meta")
            self.tensors[record.name] = DeferredTensor.of(looks, partial(self._store.__getitem__, record.name))

    def _add(self, layout: UnitLayout) -> None:
        for spec, place in zip(layout.specs, layout.places, strict=True):
            key = layout.spans[place.span].key
            looks = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
            self.tensors[spec.name] = DeferredTensor.of(looks, partial(self._read, key, place.offset, spec))

    def _read(self, key: str, offset: int, spec: SegmentSpec) -> torch.Tensor:
        """Return the values of a parameter: bytes of the store's own, which stay as long as the tensor lives."""
        if key != self._leased:
            self.close()
            self._lease, self._leased = self._store.working_set.lease(key, "r"), key
        assert self._lease is not None
        flat = self._lease.tensor[offset : offset + spec.numel * spec.dtype.itemsize].view(spec.dtype)
        return flat.as_strided(spec.shape, spec.strides)

    def close(self) -> None:
        """Give the leased key back. Idempotent."""
        lease, self._lease, self._leased = self._lease, None, ""
        if lease is not None:
            lease.release()


def _files(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a Hugging Face model's files as its own ``save_pretrained`` writes them."""
    files: dict[str, str] = dict(state.get("files", {}))
    if "config.json" in files:
        config = json.loads(files["config.json"]) | {"architectures": [state["class"]]}
        dtypes = [segment["dtype"] for segments in state["units"].values() for segment in segments]
        config["dtype"] = next((str(each).removeprefix("torch.") for each in dtypes if "float" in str(each)), None)
        files["config.json"] = _config(config)
    return files


def _config(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
