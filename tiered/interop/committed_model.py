"""CommittedModel: the model that a run's last commit holds, read without the program that trained it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tiered.errors import UsageError
from tiered.store.generations.registry import taking_apart
from tiered.store.residency.lease import Lease
from tiered.store.store import Store
from tiered.zero.committed_layout import committed_layouts
from tiered.zero.deferred_tensor import DeferredTensor
from tiered.zero.layout import SegmentSpec, UnitLayout

__all__ = ["CommittedModel"]


class CommittedModel:
    """``tensors`` are the parameters and persistent buffers by name, deferred: one key at a time is leased for them.

    A tied parameter has its first name; ``tied`` has the others. ``files`` are the texts of a Hugging Face model's
    small files by name.
    """

    def __init__(self, store: Store) -> None:
        """Raises UsageError for a store without a model, and for a state that is no model's."""
        state = store.registered_state("tiered.model")
        if state is None:
            raise UsageError(f"{store!r} holds no model")
        self._store = store
        self._lease: Lease | None = None
        self._leased = ""  # the key of ``_lease``
        self.tensors: dict[str, torch.Tensor] = {}
        with taking_apart("tiered.model", by="model"):
            for _, layout in committed_layouts(state):
                self._add(layout)
            persistent = set(state.get("persistent", state["buffers"]))
            self.tensors |= {name: each for name, each in state["buffers"].items() if name in persistent}
            self.tensors |= dict(state.get("added", {}))
            self.tied: dict[str, str] = dict(state.get("tied", {}))
            self.files = _files(state)

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
        files["config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return files
