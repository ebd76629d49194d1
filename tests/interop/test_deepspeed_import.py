"""`tiered import --deepspeed`: programs that run, the same learning rates, and a word on every key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tiered.cli import main

HF_ZERO3_NVME: dict[str, Any] = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False,
        },
        "offload_param": {
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "aio": {
            "block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True,
        },
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip

ZERO2_CPU: dict[str, Any] = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_max_lr": 3e-4, "warmup_num_steps": 2, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
        "allgather_bucket_size": 5e8, "reduce_scatter": True, "reduce_bucket_size": 5e8, "round_robin_gradients": True,
    },
    "gradient_clipping": 0.5,
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None},
}  # fmt: skip

FP16: dict[str, Any] = {
    "train_batch_size": 4,
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 500, "hysteresis": 2},
    "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
}

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "nesterov": True}},
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2, "cycle_momentum": False},
    },
    "flops_profiler": {"enabled": False},
}

CONFIGS = {"hf zero3 nvme": HF_ZERO3_NVME, "zero2 cpu": ZERO2_CPU, "fp16": FP16, "plain": PLAIN, "empty": {}}
NUM_SAMPLES = 48
Print = Callable[[object], str]


class Model(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return ((x.float() - y) ** 2).mean()


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Print:
    """Return what the command prints for a configuration."""

    def call(config: object) -> str:
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(config))
        assert main(["import", "--deepspeed", str(file)]) == 0
        return capsys.readouterr().out

    return call


def module(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "program", "exec"), names)
    return names


def loader(batch_size: int) -> DataLoader[Any]:
    x = torch.arange(NUM_SAMPLES * 8).reshape(NUM_SAMPLES, 8).remainder(7) / 7
    return DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=batch_size)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_program_runs_and_goes_on_where_it_was(name: str, printed: Print, tmp_path: Path) -> None:
    program = printed(CONFIGS[name])
    window = {"zero2 cpu": 32}.get(name, 1)
    train = module(program)["train"]
    run = {"directories": [tmp_path / "run"], "dram": "16MiB"}
    steps = NUM_SAMPLES // window
    if name == "zero2 cpu":
        assert train(Model, loader(1), 2, **run) == 2 * steps
        assert train(Model, loader(1), 3, **run) == 3 * steps, "resumed after two epochs"
    else:
        assert train(Model, loader(12), 1, **run) == 4
        assert train(Model, loader(12), 2, **run) == 8, "resumed after an epoch"
    assert not [line for line in program.splitlines() if len(line) > 80]


def test_the_values_are_those_of_the_configuration(printed: Print) -> None:
    nvme, cpu, fp16, plain = (printed(CONFIGS[name]) for name in ("hf zero3 nvme", "zero2 cpu", "fp16", "plain"))
    assert 'DIRECTORIES = ("/local_nvme/tiered",)' in nvme
    assert module(nvme)["DRAM"] == 2 * 10**9 + 2 * 5 * 10**8 + 4 * 4 * 10**9
    assert "stage=3, param_dtype=torch.float32" in nvme
    assert "betas=(0.9, 0.999)" in nvme and "clip_grad_norm_(model, 1.0)" in nvme and 'update="step"' in nvme
    assert module(cpu)["DRAM"] is None
    assert "stage=2, param_dtype=torch.bfloat16" in cpu and 'activations="recompute"' in cpu
    assert "betas=(0.9, 0.95)" in cpu and "weight_decay=0.1" in cpu and "clip_grad_norm_(model, 0.5)" in cpu
    assert "* 32):" in cpu and "as on 8 ranks" in " ".join(cpu.replace("#", "").split()), "64 samples, 2 at a time"
    assert "init_scale=256.0" in fp16 and "growth_interval=500" in fp16 and "torch.autocast(device" in fp16
    assert 'activations="swap"' in fp16 and "tiered.Lion(" in fp16 and "weight_decay=0.01" in fp16
    assert "momentum=0.9" in plain and "nesterov=True" in plain and 'update="backward"' in plain
    assert "weight_decay=0.0" in plain, "which is not tiered's default for every optimizer"


def test_every_key_is_in_the_program_or_named_with_a_reason(printed: Print) -> None:
    config = {
        **HF_ZERO3_NVME, "shiny": 1, "compression_training": {"weight_quantization": {"shared_parameters": {}}},
        "curriculum_learning": {"enabled": False}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    program = printed(config)
    said = " ".join(program.replace("#", " ").split())
    notes = said[said.index("Of ds_config.json,") :]
    refused = notes[notes.index("refused:") : notes.index("unknown:")]
    assert "compression_training: no lossy compression" in refused
    assert "curriculum_learning" not in refused and "curriculum_learning: it is off" in notes
    assert "shiny: nothing is known" in notes[notes.index("unknown:") :]
    for key in ("overlap_comm", "stage3_max_reuse_distance", "aio", "stage3_gather_16bit_weights_on_model_save"):
        assert f"zero_optimization.{key}" in notes, key
    assert 'optimizer.params.lr, scheduler.params.warmup_max_lr: "auto": learning_rate of the Trainer' in notes
    assert "fp16.hysteresis" in notes and "steps_per_print" in notes and "zero_allow_untested_optimizer" in notes


def rates(program: str, num_steps: int, total: int = 10) -> list[float]:
    """Return what torch's scheduler gives the optimizer in each step."""
    rate = module(program)["rate"]
    base = float(program.split("rate(step")[-1].split(" / ")[1].split("\n")[0])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    counts = (total,) if "total)" in program.split("def rate(step")[1].split("\n")[0] else ()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, *counts) / base)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def log_warmup(iteration: int, steps: int) -> float:
    return math.log(iteration + 1) / math.log(steps)


# The rate of a step by the counter of DeepSpeed, which is -1 in the first one.
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "WarmupLR": (
        {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 5},
        lambda i: 1e-4 if i < 0 else 1e-4 + (1e-2 - 1e-4) * (log_warmup(i, 5) if i < 5 else 1),
    ),
    "WarmupDecayLR": (
        {"total_num_steps": 10, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        lambda i: 0.0 if i < 0 else 1e-2 * (i / 4 if i < 4 else max(0.0, (10 - i) / 6)),
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 10, "warmup_num_steps": 3, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2},
        lambda i: 0.0 if i < 0 else 0.05 * (
            0.2 + 0.8 * log_warmup(i, 3) if i < 3
            else 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, (i - 2) / 7))) / 2
        ),
    ),
    "OneCycle": (
        {
            "cycle_min_lr": 0.001, "cycle_max_lr": 0.005, "cycle_first_step_size": 4, "cycle_second_step_size": 2,
            "decay_lr_rate": 0.5, "decay_step_size": 2, "cycle_momentum": False,
        },
        lambda i: (
            [0.001, 0.002, 0.003, 0.004, 0.005, 0.003, 0.001][i + 1] if i < 6 else 0.001 / (1 + 0.5 * (i - 5) / 2)
        ),
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2,
            "lr_range_test_staircase": True,
        },
        lambda i: 0.01 * (1 + 2 * ((i + 1) // 3)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_rates_are_those_of_the_schedule(name: str, printed: Print) -> None:
    params, rate = SCHEDULES[name]
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    found = rates(printed({"optimizer": optimizer, "scheduler": {"type": name, "params": params}}), 14)
    expected = [rate(step - 1) for step in range(14)]
    assert all(
        math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-18) for one, other in zip(found, expected, strict=True)
    )
    assert len(set(expected)) > 4


def test_the_total_of_a_schedule_is_counted_where_the_trainer_would_fill_it_in(printed: Print) -> None:
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}}
    fixed = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}}
    assert rates(printed(config), 12, total=10) == rates(printed(fixed), 12)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "tiered has no 'OneBitAdam'"),
        ({"optimizer": {"type": "Lamb"}}, "tiered has no 'Lamb'; expected Adam, AdamW, Lion or SGD"),
        ({"optimizer": {"type": "Muon"}}, "tiered has no 'Muon'"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "adam_w_mode is false",
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "optimizer.params.lr: expected a number"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas: expected two numbers"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optimizer.params.amsgrad: expected false"),
        ({"scheduler": {"type": "Mine"}}, "scheduler.type: no formula for 'Mine'"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps is missing"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}}, "expected a number"),
        ({"zero_optimization": {"stage": 4}}, "stage: expected 0 to 3, got 4"),
        ({"zero_optimization": {"offload_param": {"device": "tape"}}}, "expected none, cpu or nvme, got 'tape'"),
        ({"zero_optimization": 3}, "zero_optimization: expected a JSON object, got 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "no multiple"),
        ({"gradient_accumulation_steps": 0}, "expected numbers from 1 on"),
        ({"train_micro_batch_size_per_gpu": math.inf}, "train_micro_batch_size_per_gpu: expected a number, got inf"),
        ({"gradient_clipping": 10**400}, "gradient_clipping: expected a number"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 10**400]}}}, "betas: expected two numbers"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "initial_scale_power: expected at most 127"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 1}}}, "cycle_min_lr"),
        ([1], "the configuration: expected a JSON object"),
    ],
)
def test_a_configuration_without_an_equivalent_is_refused_in_one_line(
    config: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    assert main(["import", "--deepspeed", str(file)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_that_is_no_configuration_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_bytes(content)
    assert main(["import", "--deepspeed", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["import", "--deepspeed", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["import"]) == 2
    assert "--deepspeed" in capsys.readouterr().err


def test_names_of_anybody_stay_out_of_the_program(printed: Print) -> None:
    """A configuration is data: no text of it becomes code."""
    path = '/x"); raise SystemExit("'
    program = printed({
        "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": path}}, "bad\nimport os": 1,
    })  # fmt: skip
    assert module(program)["DIRECTORIES"] == (f"{path}/tiered",)
    assert "\nimport os" not in program
