"""`tiered export`: a committed run to safetensors files, without the program that trained it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from tiered.console.question import confirm
from tiered.errors import UsageError
from tiered.interop.checkpoint_folder import holds_checkpoint, write_checkpoint
from tiered.interop.committed_model import CommittedModel
from tiered.interop.saving import cast
from tiered.store.store import Store
from tiered.units import MiB, format_bytes, parse_bytes
from tiered.zero.deferred_tensor import DeferredTensor

__all__ = ["export"]

_LEAST_DRAM_NBYTES = 64 * MiB
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
    with _opened(run, external, _LEAST_DRAM_NBYTES + largest) as store:
        if store.registered_state("tiered.model") is None:
            tensors, files = _plain_tensors(store), dict(store.state.get("files", {}))
            paths = _write(folder, tensors, {}, files, dtype, max_shard_size)
        else:
            with closing(CommittedModel(store)) as model:
                tensors, files = model.tensors, model.files
                paths = _write(folder, tensors, model.tied, files, dtype, max_shard_size)
        generation = store.generation
    nbytes = sum(path.stat().st_size for path in paths)
    print(f"{len(tensors)} tensors of generation {generation}, {format_bytes(nbytes)} in {len(paths)} files: {folder}")
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


def _plain_tensors(store: Store) -> dict[str, torch.Tensor]:
    """Return the tensors of a store without a model, deferred."""
    found: dict[str, torch.Tensor] = {}
    for record in store.records():
        if isinstance(record.dtype, str):
            raise UsageError(f"{record.name} is {record.dtype}, which this torch lacks; expected a newer one")
        looks = torch.empty(record.shape, dtype=record.dtype, device="meta")
        found[record.name] = DeferredTensor.of(looks, partial(store.__getitem__, record.name))
    return found


def _write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
    files: Mapping[str, str],
    dtype: str | None,
    max_shard_size: str,
) -> list[Path]:
    def write_others(temporary: Path) -> None:
        for name, text in files.items():
            if name == "config.json" and dtype:
                config = json.loads(text) | {"dtype": str(_DTYPES[dtype]).removeprefix("torch.")}
                text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (temporary / Path(name).name).write_text(text, encoding="utf-8")

    cast_tensors = cast(dict(tensors), _DTYPES[dtype] if dtype else None)
    return write_checkpoint(
        folder, cast_tensors, max_shard_size=max_shard_size, write_others=write_others, metadata=tied
    )
