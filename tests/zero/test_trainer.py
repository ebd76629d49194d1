"""An untouched Hugging Face Trainer that clips and accumulates, over gradients on NVMe: the bits of one in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import tiered
from tests.zero.training import budget_named_in, debug_store
from tiered.errors import CapacityError
from tiered.units import KiB
from tiered.zero.gradients.stand_in import StandIn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOO_SMALL_NBYTES = 256 * KiB
LR = 1e-2


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of 16 random tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class AdamWOverMasters(torch.optim.Optimizer):
    """Fused AdamW in memory; a bf16 parameter has an fp32 master, which starts from the value before the cast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.masters: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in model.parameters():
            self.masters[parameter] = parameter.detach().clone() if dtype != torch.float32 else parameter
            parameter.data = parameter.data.to(dtype)
        self.adamw = torch.optim.AdamW(self.masters.values(), lr=LR, fused=True)
        super().__init__(model.parameters(), {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the masters by the gradients of the parameters, and the parameters by them."""
        self.adamw.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for parameter, master in self.masters.items():
            master.grad = parameter.grad if parameter.grad is None else parameter.grad.to(master.dtype)
        self.adamw.step()
        for parameter, master in self.masters.items():
            if parameter is not master:
                parameter.copy_(master)


class Watch(TrainerCallback):
    """Counts the gradients that are on NVMe once they are clipped."""

    def __init__(self) -> None:
        self.nums: list[int] = []

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.nums.append(sum(isinstance(parameter.grad, StandIn) for parameter in model.parameters()))


def build() -> nn.Module:
    torch.manual_seed(3)
    sizes = {"n_embd": 64, "n_layer": 8, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def shard(store: tiered.Store, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiered.shard(build(), store, unit=GPT2Block, param_dtype=dtype)
    return model, tiered.AdamW(model.parameters(), lr=LR)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> tuple[list[Any], list[int]]:
    """Return losses, gradient norms and learning rates as logged, and how many gradients were on NVMe at each step."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        dataloader_pin_memory=False,
    )
    watch = Watch()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(), optimizers=(optimizer, None), callbacks=[watch]
    )
    trainer.train()
    logged = [{k: log[k] for k in ("loss", "grad_norm", "learning_rate")} for log in trainer.state.log_history[:-1]]
    return logged, watch.nums


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_clipping_gives_the_bits_in_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build()
    expected, _ = train(model, AdamWOverMasters(model, dtype), tmp_path)
    with pytest.raises(CapacityError) as refusal:
        with debug_store(tmp_path / "store", TOO_SMALL_NBYTES, durable=False) as store:
            shard(store, dtype)
    with debug_store(tmp_path / "store", budget_named_in(refusal.value), durable=False) as store:
        sharded, optimizer = shard(store, dtype)
        found, nums_on_nvme = train(sharded, optimizer, tmp_path)
        state = sharded.state_dict()
    assert len(nums_on_nvme) == 4 and all(nums_on_nvme)
    assert found == expected
    assert any(log["grad_norm"] > 1.0 for log in found), "nothing was clipped"
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, state[name])] == []
