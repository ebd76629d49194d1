"""weights= reads a safetensors file that anybody may have made: it is refused by name, or read as it says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiered
from tests.store.rig import simulated_store
from tiered.errors import CorruptionError, UsageError

NUM_FILES = 400


def spoilt(good: bytes, rng: random.Random) -> bytes:
    """Return the file with something wrong in its header, its length or its end."""
    header_nbytes = int.from_bytes(good[:8], "little")
    action = rng.randrange(5)
    if action == 0:
        content = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            content[rng.randrange(8 + header_nbytes)] ^= rng.randrange(1, 256)
        return bytes(content)
    if action == 1:
        nbytes = rng.choice([0, 1, 1 << 40, (1 << 64) - 1, header_nbytes + 1, len(good)])
        return nbytes.to_bytes(8, "little") + good[8:]
    if action == 2:
        return good[: rng.randrange(len(good))]
    if action == 3:
        return rng.randbytes(rng.randrange(300))
    fields: dict[str, dict[str, Any]] = json.loads(good[8 : 8 + header_nbytes])
    tensor = fields[rng.choice(sorted(fields))]
    tensor[rng.choice(sorted(tensor))] = rng.choice(
        [[0, 1 << 60], [1 << 62, 1 << 62], "F64", "X", [-1], None, [0, 0], {}, "I8", "BF16", 7]
    )
    header = json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header + good[8 + header_nbytes :]


def test_a_hostile_file_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    good = path.read_bytes()
    with simulated_store(budget_nbytes=1 << 20) as store:
        for seed in range(NUM_FILES):
            path.write_bytes(spoilt(good, random.Random(seed)))
            with pytest.raises((CorruptionError, UsageError), match="weights"):
                tiered.shard(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), store, weights=path)
        assert len(store) == 0


def test_weights_in_a_pickle_are_refused_and_taken_as_the_message_says(tmp_path: Path) -> None:
    expected = nn.Linear(4, 4)
    torch.save(expected.state_dict(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with tiered.Store(engine="memory", dram="16MiB") as store:
        for source in (tmp_path, tmp_path / "pytorch_model.bin"):
            with pytest.raises(tiered.UsageError, match=r"torch\.load\(FILE, mmap=True, weights_only=True\)"):
                tiered.shard(model, store, weights=source)
        loaded = torch.load(tmp_path / "pytorch_model.bin", mmap=True, weights_only=True)
        sharded = tiered.shard(model, store, weights=loaded)
        with tiered.unsharded(sharded):
            assert torch.equal(sharded.weight, expected.weight) and torch.equal(sharded.bias, expected.bias)


def test_arrays_of_numpy_are_taken_as_weights_and_others_refused_by_name() -> None:
    """In any order and byte order, for reading only, beside tensors; a buffer without dimensions, too."""
    expected = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    arrays: dict[str, Any] = {name: value.numpy() for name, value in expected.state_dict().items()}
    arrays["0.weight"] = np.asfortranarray(arrays["0.weight"])
    arrays["0.bias"] = arrays["0.bias"].astype(">f4")
    arrays["1.weight"] = arrays["1.weight"][::-1].copy()[::-1]
    arrays["2.weight"] = torch.from_numpy(arrays["2.weight"])
    arrays["2.bias"].setflags(write=False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with simulated_store(budget_nbytes=1 << 20) as store:
        for value in ([1.0] * 4, np.array(["a"] * 4)):
            with pytest.raises(TypeError, match=r"weights= has (list|ndarray) for 0\.bias; expected a tensor"):
                tiered.shard(model, store, weights=arrays | {"0.bias": value})
        with pytest.raises(UsageError, match=r"0\.bias is complex, and real in the model"):
            tiered.shard(model, store, weights=arrays | {"0.bias": arrays["0.bias"].astype("c8")})
        found = tiered.shard(model, store, weights=arrays).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
