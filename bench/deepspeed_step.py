#!/usr/bin/env python3
"""The same GPT trained by DeepSpeed ZeRO-Infinity on the CPU, its parameters and optimizer state on NVMe.

Usage: DS_ACCELERATOR=cpu python bench/deepspeed_step.py FOLDER '{"layers": 2, "width": 64, ...}'

Needs torch, deepspeed and ninja from PyPI, g++, and libaio with its headers (Debian: libaio-dev): DeepSpeed compiles
its I/O at first use. It knows nothing of tiered; the model is read from tiered's file. Prints one JSON line last.
"""

import importlib.util
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "tiered" / "tools" / "train" / "task.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


ONE_RANK = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
for name, value in {**ONE_RANK, "MASTER_PORT": free_port(), "DS_ACCELERATOR": "cpu"}.items():
    os.environ.setdefault(name, str(value))

import deepspeed  # noqa: E402  # reads its environment when it is imported
import psutil  # noqa: E402
import torch  # noqa: E402


def configuration(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings: nothing stays in memory that can be on NVMe, reads and writes are pipelined.

    Sizes of buffers are what this model needs; others were not tried.
    """
    wide = settings["width"] >= 2048
    nvme = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings["batch"],
        "gradient_accumulation_steps": settings["micro_steps"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "buffer_count": 8, "buffer_size": 30_000_000, "max_in_cpu": 0},
            "offload_optimizer": {**nvme, "buffer_count": 14, "pipeline_read": True, "pipeline_write": True},
            "sub_group_size": 60_000_000 if wide else 20_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_max_live_parameters": 50_000_000,
            "stage3_param_persistence_threshold": 100_000 if wide else 1_000,
            "stage3_max_reuse_distance": 0,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False},
        "steps_per_print": 1_000_000,
    }
    if settings["clip"]:
        config["gradient_clipping"] = settings["clip"]
    return config


def io_bytes() -> tuple[int, int]:
    counters = psutil.Process().io_counters()
    return counters.read_bytes, counters.write_bytes


def batches_of(settings: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches that ours trains on."""
    size = (settings["micro_steps"], settings["batch"], settings["context"] + 1)
    found = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(1))
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in found]


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.spec_from_file_location("gpt", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module  # order: dataclasses look their module up while it is being executed
    spec.loader.exec_module(module)
    shape = module.Shape(**{name: settings[name] for name in ("layers", "width", "heads", "context")})
    config = configuration(folder, settings)
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = module.GPT(shape)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    batches = batches_of(settings)
    seconds, losses = [], []
    start_io = io_bytes()
    for _ in range(settings["steps"]):
        start = time.perf_counter()
        total = 0.0
        for inputs, targets in batches:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        seconds.append(time.perf_counter() - start)
        losses.append(total / len(batches))
        if len(seconds) == 1:
            start_io = io_bytes()
    moved = shape.num_params * max(1, settings["steps"] - 1)
    read, written = (after - before for after, before in zip(io_bytes(), start_io, strict=True))
    result = {
        "seconds": seconds,
        "losses": losses,
        "num_params": shape.num_params,
        "io_read_bytes_per_param": read / moved,
        "io_write_bytes_per_param": written / moved,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": deepspeed.__version__,
    }
    print(f"\n{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
