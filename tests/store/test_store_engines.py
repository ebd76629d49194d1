"""A store is the same on every engine: what one has written another reads."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.store.rig import numbers
from tiered.bytes.device.engines import DEVICES
from tiered.store.store import Store
from tiered.units import KiB, MiB


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("engine", DEVICES)
def test_tensors_of_any_size_come_back(tmp_path: Path, engine: str, durable: bool) -> None:
    values = {str(nbytes): numbers(nbytes, nbytes) for nbytes in (100, 4096, 70_001, 9 * MiB + 5)}
    with Store(tmp_path / "run", dram="8MiB", engine=engine, durable=durable) as store:
        store.put_many(values)
        for key, value in values.items():
            assert torch.equal(store[key], value)
        if durable:
            store.commit({"engine": engine})
            assert store.verify().is_clean


@pytest.mark.parametrize(("writer", "reader"), list(itertools.permutations(DEVICES, 2)))
def test_what_one_engine_has_written_another_reads(tmp_path: Path, writer: str, reader: str) -> None:
    values = {str(i): numbers(300 * KiB, i) for i in range(4)}
    with Store(tmp_path / "run", dram="8MiB", engine=writer) as store:
        store.put_many(values)
        store.commit({"by": writer})
    with Store(tmp_path / "run", dram="8MiB", engine=reader, mode="a") as store:
        assert store.state == {"by": writer}
        assert all(torch.equal(store[key], value) for key, value in values.items())
        store["0"] = values["3"]
        store.commit({"by": reader})
    with Store(tmp_path / "run", dram="8MiB", engine=writer, mode="r") as store:
        assert torch.equal(store["0"], values["3"])
