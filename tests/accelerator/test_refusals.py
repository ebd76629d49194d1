"""What a compute device cannot do: a graph of kernels around a sharded model, and anything once it has failed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiered
from tests.accelerator.test_faults import OPTIONS, begun
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on
from tests.reference import Recipe
from tests.zero.training import assert_same, start
from tiered.errors import UsageError
from tiered.tiers import accelerator
from tiered.tools.train.launch import Launch


def test_a_forward_or_step_that_is_captured_into_a_graph_is_refused_and_harms_nothing(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store)
        loss = session.case.loss(session.model, session.case.batch(2))
        loss.backward()
        with monkeypatch.context() as capture:
            capture.setattr(accelerator, "is_capturing", lambda device: device.type == "sim")
            with pytest.raises(UsageError, match="no capture around a sharded model"):
                session.case.loss(session.model, session.case.batch(2))
            with pytest.raises(UsageError, match="no capture around a sharded model"):
                session.optimizer.step()
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.trained.losses.append(loss.detach())
        session.run_step(3)
        assert_same(session.collect(), reference_on("sim", "gpt", Recipe()))


def test_a_close_after_the_device_has_failed_says_so_and_the_last_commit_is_there(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES)
    session = begun(store)
    values = {name: value.cpu() for name, value in session.model.state_dict().items()}
    session.run_step(2)

    def fail(word: str) -> None:
        raise torch.AcceleratorError("a kernel has failed")

    store.add_guard(fail)  # from here on, as every call of torch's on such a device
    with caplog.at_level(logging.ERROR, "tiered"):
        store.close()
    assert caplog.messages[-1:] == [
        "closed at generation 1, since the compute device has failed for good: a kernel has failed"
    ]
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=0) as store:
        session = start(case_on("cpu", "gpt"), Recipe(), store, **(OPTIONS | {"device": "cpu"}))
        assert store.resume()["step"] == 2
        assert all(torch.equal(value, values[name]) for name, value in session.model.state_dict().items())


def test_a_layer_of_the_device_is_added_before_shard_or_trained_by_torch(sim: ModuleType, tmp_path: Path) -> None:
    def parts() -> list[torch.nn.Module]:
        torch.manual_seed(0)
        return [torch.nn.Linear(8, 8).to("sim") for _ in range(2)]

    def trained(optimizers: list[torch.optim.Optimizer], layers: list[torch.nn.Module]) -> torch.Tensor:
        for _ in range(2):
            layers[1](layers[0](torch.ones(2, 8, device="sim"))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return layers[1].state_dict()["weight"].cpu()

    plain = torch.nn.Sequential(*parts())
    expected = trained([torch.optim.AdamW(plain.parameters(), fused=True)], list(plain))
    with tiered.Store(tmp_path / "after", dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        base, head = parts()
        base = tiered.shard(base, store, device="sim")
        with pytest.raises(UsageError, match=r"\(8, 8\), is in ordinary memory of sim:0.*before tiered.shard\("):
            tiered.AdamW([*base.parameters(), *head.parameters()])
        ours, theirs = tiered.AdamW(base.parameters()), torch.optim.AdamW(head.parameters(), fused=True)
        assert torch.equal(trained([ours, theirs], [base, head]), expected)
    with tiered.Store(tmp_path / "before", dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        whole = tiered.shard(torch.nn.Sequential(*parts()), store, device="sim")
        optimizer = tiered.AdamW(whole.parameters())
        for _ in range(2):
            whole(torch.ones(2, 8, device="sim")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(whole.state_dict()["1.weight"].cpu(), expected)


def test_each_rank_takes_the_device_of_its_number(sim: ModuleType) -> None:
    """Or none, where there are fewer than ranks."""
    ranks = [Launch(rank, 3, device_index=rank) for rank in range(3)]
    for rank in ranks:
        rank.local_world = 3
    before = torch.accelerator.current_device_index()
    try:
        for rank in ranks[:2]:
            with pytest.raises(
                UsageError, match=r"device sim:1 for 3 ranks of this machine; .* --device sim gives each"
            ):
                rank.take_device("sim:1", None)
            for word in ("sim", "auto"):
                rank.take_device(word, None)
                assert torch.accelerator.current_device_index() == rank.rank
        with pytest.raises(UsageError, match=r"2 accelerators here, and LOCAL_RANK is 2; .* or --device cpu"):
            ranks[2].take_device("auto", None)
        ranks[2].take_device("cpu", None)
    finally:
        torch.accelerator.set_device_index(before)
