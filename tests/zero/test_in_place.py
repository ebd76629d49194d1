"""A frozen base that is read from its own safetensors files: never copied or written, to the bits of plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import tiered
from tiered.errors import CorruptionError, UsageError
from tiered.units import KiB

WIDTH, BLOCKS = 160, 6
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Parameter(torch.randn(4, width) / 10)
        self.up = nn.Parameter(torch.zeros(width, 4))
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(self.norm(x)) + x @ self.down.T @ self.up.T)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Adapted() for _ in range(BLOCKS)))


def saved(folder: Path) -> list[Path]:
    """Save the model's values in two files and return them."""
    values = {name: value.contiguous() for name, value in model().state_dict().items()}
    paths = [folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"]
    save_file({name: value for name, value in values.items() if name < "3"}, paths[0])
    save_file({name: value for name, value in values.items() if name >= "3"}, paths[1])
    return paths


def batch(step: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(step))


def train(net: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        loss = net(batch(step, net[0].norm.normalized_shape[0])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def reference(num_steps: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    net = model()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **ADAMW, fused=True)
    return train(net, optimizer, range(num_steps)), net.state_dict()


def sharded(
    store: tiered.Store, paths: list[Path] | None, *, width: int = WIDTH, blocks: int = BLOCKS, **options: Any
) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        net: Any = nn.Sequential(*(Adapted(width) for _ in range(blocks)))
    net = tiered.shard(net, store, unit=Adapted, weights=paths, hold=0, **options)
    return net, tiered.AdamW([p for p in net.parameters() if p.requires_grad], **ADAMW)


def read_in_place(store: tiered.Store) -> int:
    assert store.external.device is not None
    return store.external.device.statistics().read_bytes


TRAINED_NBYTES = BLOCKS * 4 * (8 * WIDTH)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_adapters_over_a_base_in_place_have_the_bits_of_plain_pytorch(tmp_path: Path, activations: str) -> None:
    paths = saved(tmp_path)
    before = [path.read_bytes() for path in paths]
    losses, state = reference(6)
    with tiered.Store(tmp_path / "run", dram="8MiB", external=paths) as store:
        net, optimizer = sharded(store, paths, activations=activations)
        found = train(net, optimizer, range(3))
        store.commit({"step": 3})
        # Adapters, and their moments; padded to pages, a key for each unit.
        data = store.working_set.space.used_nbytes
        assert data <= 3 * TRAINED_NBYTES + 4 * 4 * KiB * BLOCKS
        written = store.statistics().write_bytes
        assert written <= 4 * (3 * TRAINED_NBYTES + 4 * 4 * KiB * BLOCKS)
    with tiered.Store(tmp_path / "run", dram="8MiB", external=[tmp_path]) as store:
        net, optimizer = sharded(store, None, activations=activations)
        assert store.resume() == {"step": 3}
        found += train(net, optimizer, range(3, 6))
        with tiered.unsharded(net):
            assert all(torch.equal(value, state[name]) for name, value in net.named_parameters())
        store.commit({"step": 6})
        assert store.verify().is_clean
    assert all(torch.equal(*pair) for pair in zip(found, losses, strict=True))
    assert [path.read_bytes() for path in paths] == before


def test_a_base_that_does_not_fit_is_read_twice_in_a_step(tmp_path: Path) -> None:
    """2p less the units that are still there where forward meets backward, and a step the next: at most 4 in 8 MiB."""
    width, blocks, steps = 700, 8, 3
    torch.manual_seed(3)
    values = nn.Sequential(*(Adapted(width) for _ in range(blocks))).state_dict()
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "base.safetensors")
    with tiered.Store(tmp_path / "run", dram="8MiB", external=[tmp_path]) as store:
        net, optimizer = sharded(store, [tmp_path / "base.safetensors"], width=width, blocks=blocks, activations="keep")
        train(net, optimizer, range(2))
        before, own = read_in_place(store), store.statistics().read_bytes
        train(net, optimizer, range(2, 2 + steps))
        read = read_in_place(store) - before
        own = store.statistics().read_bytes - own - read
    unit = 4 * (width * width + 3 * width)
    edges = 3 * 4 * 2 * 4 * KiB  # of the ranges of a unit, in each of its slabs: less than two pages at either end
    assert steps * (2 * blocks - 2 * 4) * unit <= read <= steps * 2 * blocks * (unit + edges)
    assert own <= steps * blocks * 100 * KiB  # adapters and their moments


def test_spans_that_do_not_lie_in_a_file_as_they_are_needed_are_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = saved(tmp_path)
    caplog.set_level("INFO", "tiered")
    with tiered.Store(tmp_path / "run", dram="16MiB", external=paths[:1], durable=False) as store:
        net, _ = sharded(store, paths)
        assert "3.9 MiB" not in caplog.text
        in_place = [record.getMessage() for record in caplog.records if "read in place" in record.getMessage()]
        assert len(in_place) == 1 and "whose file is not among the external ones" in in_place[0]
        with torch.no_grad():
            assert torch.equal(net(batch(0)), model()(batch(0)))
    caplog.clear()
    with tiered.Store(tmp_path / "cast", dram="16MiB", external=paths, durable=False) as store:
        net, _ = sharded(store, paths, param_dtype=torch.bfloat16)
        assert "which is float32 there and torch.bfloat16 here" in caplog.text
        assert not any(entry.row is not None and entry.row.ranges for entry in store.working_set.entries.used())


def test_a_flipped_bit_of_the_base_is_found_in_the_forward_that_reads_it(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    with tiered.Store(tmp_path / "run", dram="8MiB", external=paths) as store:
        net, optimizer = sharded(store, paths)
        train(net, optimizer, range(1))
        store.commit({"step": 1})
        entry = store.external.find(paths[1], "4.base.weight")
    with open(paths[1], "r+b") as file:
        file.seek(entry.offset + 5001)
        byte = file.read(1)[0]
        file.seek(entry.offset + 5001)
        file.write(bytes((byte ^ 1,)))
    with tiered.Store(tmp_path / "run", dram="8MiB", external=paths) as store:
        net, optimizer = sharded(store, None)
        store.resume()
        with pytest.raises(CorruptionError) as caught:
            train(net, optimizer, range(1, 2))
        assert caught.value.file == str(paths[1]) and 0 < caught.value.offset <= entry.offset + 5001
        store.rollback()


def test_unfreezing_lays_a_unit_out_in_the_store(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    before = [path.read_bytes() for path in paths]
    plain = model()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW, fused=True)
    losses = train(plain, optimizer, range(2))
    plain[2].base.requires_grad_(True)
    optimizer.add_param_group({"params": list(plain[2].base.parameters())})
    losses += train(plain, optimizer, range(2, 4))
    with tiered.Store(tmp_path / "run", dram="8MiB", external=paths) as store:
        with torch.device("meta"):
            net: Any = nn.Sequential(*(Adapted() for _ in range(BLOCKS)))
        net = tiered.shard(net, store, unit=Adapted, weights=paths, hold=0)
        ours = tiered.AdamW(net.parameters(), **ADAMW)
        found = train(net, ours, range(2))
        net[2].base.requires_grad_(True)
        found += train(net, ours, range(2, 4))
        store.commit()
        with tiered.unsharded(net):
            assert all(torch.equal(value, plain.state_dict()[name]) for name, value in net.named_parameters())
    assert all(torch.equal(*pair) for pair in zip(found, losses, strict=True))
    assert [path.read_bytes() for path in paths] == before


def gpt2() -> tuple[Any, Any, str]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel, config, "c_attn"


def llama() -> tuple[Any, Any, str]:
    """The frequencies of its rotary embedding are buffers that the constructor computes, and no file has."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=256, max_position_embeddings=32,
        intermediate_size=96, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM, config, "q_proj"


@pytest.mark.parametrize("kind", [gpt2, llama])
@pytest.mark.filterwarnings("ignore")
def test_peft_adapters_over_a_base_in_place(kind: Any, tmp_path: Path) -> None:
    """As docs/training.md has it, against the same in memory: a bf16 base, saved by transformers, adapters by PEFT."""
    model_class, config, target = kind()
    transformers.utils.logging.disable_progress_bar()  # whose thread outlives it
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[target], fan_in_fan_out=kind is gpt2)
    base = tmp_path / "base"
    model_class(config).to(torch.bfloat16).save_pretrained(base)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora)

    def losses(model: Any, optimizer: Any, first: int, last: int) -> list[torch.Tensor]:
        found = []
        for step in range(first, last):
            ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    plain = adapted(model_class.from_pretrained(base, dtype=torch.bfloat16))
    trained = [p for p in plain.parameters() if p.requires_grad]
    expected = losses(plain, torch.optim.AdamW(trained, lr=1e-3, fused=True), 0, 5)
    found = []
    for first, last in ((0, 4), (4, 5)):
        with tiered.Store(tmp_path / "run", dram="32MiB", external=[base]) as store:
            drawn = torch.get_rng_state()
            with torch.device("meta"):
                model = model_class(config).to(torch.bfloat16)
            model = tiered.shard(model.requires_grad_(False), store, weights=base)
            assert torch.equal(drawn, torch.get_rng_state())
            model = adapted(model)
            optimizer = tiered.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, store=store)
            assert store.resume().get("step", 0) == first
            found += losses(model, optimizer, first, last)
            store.commit({"step": last})
            numel = sum(p.numel() for p in trained)
            assert store.working_set.space.used_nbytes <= 3 * 4 * numel + 16 * 4 * KiB  # adapters and moments, padded
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_run_is_not_resumed_without_its_base(tmp_path: Path) -> None:
    paths = saved(tmp_path)
    with tiered.Store(tmp_path / "run", dram="8MiB", external=paths) as store:
        sharded(store, paths)
        store.commit()
    with pytest.raises(UsageError, match="which is missing"):
        tiered.Store(tmp_path / "run", dram="8MiB", external=paths[:1])
    assert json.loads((tmp_path / "run" / "identity").read_text())["format"] == 1
