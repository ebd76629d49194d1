#!/usr/bin/env python3
"""What a step writes where most of a model is frozen: adapters over a base, half of the blocks, one unfrozen later.

Usage: python bench/frozen.py [--layers 8 --width 768 --rank 4 --steps 4 --store DIR]

A GPT-2 of transformers with random weights, its blocks the units, trained with a commit after each step: by LoRA
adapters of PEFT, with its first half frozen, and with a block of that half unfrozen after half of the steps. Counted
are the bytes of each step from its forward to the end of its commit, by the store's own counters and by /proc/self/io;
the most of any step is compared with 16 bytes per trained parameter and 1 MB. The step in which a block is unfrozen
also lays that block out anew, and is told apart. Losses, parameters and moments are compared with plain PyTorch's, bit
by bit. One JSON line comes last.
"""

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import psutil
import torch
import transformers
from torch import nn

import tiered
from tiered.units import MiB

ROOT = Path(__file__).resolve().parents[1]
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.05}
BYTES_PER_TRAINED = 16
BYTES_ASIDE = 10**6
VOCABULARY, CONTEXT = 1024, 128

Event = Callable[[nn.Module], None]


def base(args: argparse.Namespace) -> nn.Module:
    """Return the GPT-2, without dropout."""
    sizes = {"n_layer": args.layers, "n_embd": args.width, "n_head": args.heads, "vocab_size": VOCABULARY}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=CONTEXT, **sizes, **dropouts, **tokens))


def with_adapters(args: argparse.Namespace) -> nn.Module:
    """Return the GPT-2 under LoRA adapters of its attention: nothing else is trained."""
    config = peft.LoraConfig(r=args.rank, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name that is to go
        return peft.get_peft_model(base(args), config)


def half_frozen(args: argparse.Namespace) -> nn.Module:
    """Return the GPT-2 with its embeddings and the first half of its blocks frozen."""
    model: Any = base(args)
    for frozen in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[: args.layers // 2]):
        frozen.requires_grad_(False)
    return model


def unfreeze(model: Any) -> None:
    """Unfreeze the last of the blocks that are frozen."""
    model.transformer.h[len(model.transformer.h) // 2 - 1].requires_grad_(True)


def io_write_bytes() -> int:
    return psutil.Process().io_counters().write_bytes


def store_write_bytes(store: tiered.Store) -> int:
    statistics = store.statistics()
    return statistics.write_bytes + statistics.catalog_write_bytes


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


def in_memory(model: nn.Module, events: dict[int, Event], num_steps: int) -> tuple[list[float], Any, nn.Module]:
    """Train by plain PyTorch; return the losses, the moments and the model."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    losses = []
    for step in range(num_steps):
        events.get(step, lambda model: None)(model)
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer.state_dict()["state"], model


def measure(name: str, model: nn.Module, events: dict[int, Event], args: argparse.Namespace) -> dict[str, Any]:
    """Train ``model`` both ways and compare; return the bytes of each step."""
    losses, moments, plain = in_memory(copy.deepcopy(model), events, args.steps)
    num_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    block = transformers.models.gpt2.modeling_gpt2.GPT2Block
    rows: list[dict[str, Any]] = []
    args.store.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store) as folder, tiered.Store(folder, dram=args.dram * MiB) as store:
        sharded = tiered.shard(model, store, unit=(block,))
        optimizer = tiered.AdamW(sharded.parameters(), update=args.update, **ADAMW)
        store.commit({"step": 0})
        is_same = True
        for step in range(args.steps):
            events.get(step, lambda model: None)(sharded)
            before = store_write_bytes(store), io_write_bytes()
            loss = loss_of(sharded, step)
            loss.backward()
            is_same &= loss.item() == losses[step]
            del loss
            optimizer.step()
            optimizer.zero_grad()
            store.commit({"step": step + 1})
            num_trained = sum(p.numel() for p in sharded.parameters() if p.requires_grad)
            written, io_written = store_write_bytes(store) - before[0], io_write_bytes() - before[1]
            limit = BYTES_PER_TRAINED * num_trained + BYTES_ASIDE
            rows.append({"written": written, "io_written": io_written, "limit": limit, "relayout": step in events})
            print(
                f"{name}, step {step}: {num_trained / 1e6:.3f} M trained, {num_frozen / 1e6:.1f} M frozen at first;"
                f" {written / 1e6:.2f} MB written, /proc/self/io {io_written / 1e6:.2f}, at most {limit / 1e6:.2f}"
                f"{' but for what is laid out anew' if step in events else ''}"
            )
        state = sharded.state_dict()
        is_same &= all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
        ours = optimizer.state_dict()["state"]
        is_same &= ours.keys() == moments.keys() and all(
            torch.equal(ours[index][key], value) for index, each in moments.items() for key, value in each.items()
        )
    print(f"{name}: losses, parameters and moments are {'those of' if is_same else 'NOT THOSE OF'} plain PyTorch")
    steps = [row for row in rows if not row["relayout"]]
    is_within = all(max(row["written"], row["io_written"]) <= row["limit"] for row in steps)
    return {"same_bits": is_same, "within": is_within, "num_frozen": num_frozen, "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--update", default="step", choices=("step", "backward"))
    parser.add_argument("--dram", type=int, default=256, help="the budget in MiB")
    parser.add_argument("--store", type=Path, default=ROOT / "runs", help="where the folder for the store is made")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    result = {}
    cases: dict[str, tuple[Callable[[argparse.Namespace], nn.Module], dict[int, Event]]] = {
        "lora": (with_adapters, {}),
        "half": (half_frozen, {}),
        "later": (half_frozen, {args.steps // 2: unfreeze}),
    }
    for name, (build, events) in cases.items():
        torch.manual_seed(7)
        result[name] = measure(name, build(args), events, args)
    print(json.dumps({"bench": "frozen", **result}))


if __name__ == "__main__":
    main()
