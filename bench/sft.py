#!/usr/bin/env python3
"""TRL's SFTTrainer over a store, beside TRL's own in memory: losses, gradient norms and parameters, bit by bit.

Needs ``pip install trl`` (300 MB with datasets and pyarrow), which is why it is not in the suite. TRL reads the head's
weight in an autograd.Function of its own (a fused head), enables checkpointing itself, and wraps models with PEFT.

    python bench/sft.py            # all rows; the last line is JSON
    python bench/sft.py llama lora # one row: a model of tests/interop/small_models.py, then words of ``WORDS``
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tiered
from tests.interop.small_models import Tokens, build, history, same_state, state_of, training_arguments

WORDS = {
    "lora": {},  # adapters over a frozen base
    "checkpointed": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
NAMES = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "max_steps", "seed", "eval_steps",
    "learning_rate", "weight_decay", "lr_scheduler_type", "warmup_steps", "logging_steps", "eval_strategy", "use_cpu",
    "save_strategy", "save_steps", "disable_tqdm", "dataloader_pin_memory",
)  # fmt: skip
ROWS = [
    ("llama",), ("gpt2",), ("mixtral",), ("llama", "lora"), ("gpt2", "checkpointed"), ("llama", "reentrant"),
    ("llama", "lora", "reentrant"), ("llama", "lora", "checkpointed"),
]  # fmt: skip


class Supervised(tiered.hf.TrainerMixin, SFTTrainer):
    """TRL's trainer over a store: this is all that a user writes."""


def main() -> None:
    """Compare all rows, or the one that the command line names."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [tuple(sys.argv[1:])] if len(sys.argv) > 1 else ROWS
    found = {" ".join(row): compare(*row) for row in rows}
    for name, is_same in found.items():
        print(f"{name:<28} {'the bits in memory' if is_same else 'OTHER BITS'}")
    print(json.dumps({"bench": "sft", "torch": torch.__version__, "same": found}))
    sys.exit(not all(found.values()))


def compare(name: str, *words: str) -> bool:
    """Return whether a run of the model ``name`` has the bits of one in memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        expected = train(SFTTrainer, name, words, path / "plain", max_steps=6)
        ours = {"store": path / "store", "dram": "16MiB"}
        found = train(Supervised, name, words, path / "ours", max_steps=6, tiered=ours)
    return found[0] == expected[0] and same_state(found[1], expected[1])


def train(cls: Any, name: str, words: tuple[str, ...], path: Path, *, max_steps: int, **ours: Any) -> Any:
    """Train and return what was logged, and the state at the end."""
    options = {key: value for word in words for key, value in WORDS[word].items()}
    given = training_arguments(path, max_steps=max_steps, **options)
    chosen = {key: getattr(given, key) for key in NAMES} | options
    arguments = SFTConfig(
        output_dir=str(path), report_to="none", bf16=False, max_length=12,
        dataset_kwargs={"skip_prepare_dataset": True}, **chosen,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if "lora" in words else None
    trainer = cls(
        model=build(name), args=arguments, train_dataset=data(22, 0), eval_dataset=data(6, 1),
        processing_class=tokenizer(), peft_config=lora, **ours,
    )  # fmt: skip
    trainer.train()
    outcome = history(trainer), state_of(trainer.model)
    if ours:
        trainer.close()
    return outcome


def data(num_items: int, seed: int) -> Dataset:
    """Return tokens as the table that TRL wants."""
    tokens = Tokens(num_items, seed)
    table = pyarrow.table({"input_ids": [tokens[index]["input_ids"].tolist() for index in range(num_items)]})
    return Dataset(InMemoryTable(table), fingerprint=f"{num_items}-{seed}")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 words."""
    words = {f"t{index}": index for index in range(64)}
    fast = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="t0", eos_token="t1")


if __name__ == "__main__":
    main()
