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
from tiered.store.store import Store
from tiered.tools.console import confirm
from tiered.units import MiB, format_bytes, parse_bytes
from tiered.zero.deferred_tensors import DeferredFiles, DeferredTensor, safetensors_files
from tiered.zero.layout import Place, SegmentSpec, Span, UnitLayout, committed_layouts
from tiered.zero.model_state import refuse_missing
from tiered.zero.reshard import opened_ranks, read_span

__all__ = ["export", "import_files"]

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
    other store gives each tensor under its key. ``run`` may have the stores of several ranks. ``external`` are the
    user's own files that some of it lies in. Memory takes the largest tensor. Raises UsageError where there is no
    commit, while a program has the run open for writing, and where ``folder`` holds a checkpoint that may not be
    replaced; CapacityError, DeviceError.
    """
    parse_bytes(max_shard_size)
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(_DTYPES)}")
    missing = [path for path in run if not path.is_dir()]
    if missing:
        raise UsageError(f"no run in {', '.join(map(str, missing))}")
    if holds_checkpoint(folder):
        confirm(
            f"{folder} holds a checkpoint: replace it?",
            unasked=f"{folder} holds a checkpoint and there is no terminal to ask on: add --yes or name another",
            declined="nothing was written",
            yes=yes,
        )
    with opened_ranks(run, external) as stores:
        if not stores[0].generation:
            raise UsageError(f"nothing was committed in {', '.join(map(str, run))} yet")
        committed = CommittedTensors(stores)
        paths = _write(folder, committed, dtype, max_shard_size)
        num_tensors, generation = len(committed.tensors), stores[0].generation
    nbytes = sum(path.stat().st_size for path in paths)
    print(f"{num_tensors} tensors of generation {generation}, {format_bytes(nbytes)} in {len(paths)} files: {folder}")
    return 0


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
    """The tensors of a run's last commit by name, deferred, read without the program that made them.

    A training run gives its model's parameters and persistent buffers; a tied parameter has its first name, and
    ``tied`` has the others. Any other store gives each tensor under its key. Over ranks a parameter is put together
    from the shards in the ``stores`` of all. ``files`` are the texts of a Hugging Face model's small files by name.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        """Raises UsageError for a state that is no model's, and for a model that lacks some of its keys."""
        store = stores[0]
        state = store.registered_state("tiered.model")
        self._store, self._stores = store, stores
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, str] = {}
        if state is None:
            self.files: dict[str, str] = dict(store.state.get("files", {}))
            self._add_plain_tensors()
            return
        if (world := state.get("world", 1)) != len(stores):  # an earlier release knew one rank alone
            raise UsageError(
                f"the store holds one rank's shards of a model over {world} ranks; expected the directory that those of"
                " all ranks lie in"
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
        for each in stores:
            refuse_missing(each, (span.key for layout in layouts for span in layout.spans))

    def _add_plain_tensors(self) -> None:
        for record in self._store.records():
            looks = torch.empty(record.shape, dtype=record.dtype, device="meta")
            self.tensors[record.name] = DeferredTensor.of(looks, partial(self._store.__getitem__, record.name))

    def _add(self, layout: UnitLayout) -> None:
        for spec, place in zip(layout.specs, layout.places, strict=True):
            looks = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="meta")
            self.tensors[spec.name] = DeferredTensor.of(
                looks, partial(self._read, layout.spans[place.span], place, spec)
            )

    def _read(self, span: Span, place: Place, spec: SegmentSpec) -> torch.Tensor:
        """Return the values of a parameter, in memory of their own."""
        values = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
        read_span(self._stores, span.key, span.shard_nbytes, place.offset, values)
        return values.view(spec.dtype).as_strided(spec.shape, spec.strides)


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
