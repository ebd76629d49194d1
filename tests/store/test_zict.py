"""The battery that zict has for mappings, over a store and over a cache, as dask's and others' spilling expect it."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zict
from zict.tests import utils_test

from tiered.store.store import Store


def to_tensor(value: bytes) -> torch.Tensor:
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes, got {type(value).__name__}")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def mapping(store: Store, kind: str) -> MutableMapping[str, Any]:
    inner: MutableMapping[str, torch.Tensor] = store if kind == "store" else store.cache("c/", capacity="1MiB")
    return zict.Func(to_tensor, to_bytes, inner)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["store", "cache"])
@pytest.mark.parametrize(
    "check",
    [
        utils_test.check_mapping,
        utils_test.check_different_keys_threadsafe,
        utils_test.check_same_key_threadsafe,
        utils_test.check_bad_key_types,
        utils_test.check_bad_value_types,
    ],
)
def test_zict_finds_a_mapping(tmp_path: Path, kind: str, check: Any) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        check(mapping(store, kind))


def test_what_is_no_key_is_in_no_view(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        for found in (store, store.cache("c/", capacity="1MiB")):
            found["a"] = torch.ones(3)
            assert (1, torch.ones(3)) not in found.items() and 1 not in found
            with pytest.raises(KeyError, match="expected a str"):
                found[1]  # type: ignore[index]
            with pytest.raises(KeyError):
                del found[1]  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="expected a str"):
                found[1] = torch.ones(3)  # type: ignore[index]
