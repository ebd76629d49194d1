"""Short trainings with each optimizer, as digests of all bits that come out; they need no numba."""

import hashlib
from pathlib import Path

import torch

import tiered

WAYS = {
    "exact AdamW": (tiered.AdamW, {}),
    "exact SGD": (tiered.SGD, {"momentum": 0.9}),
    "exact Lion": (tiered.Lion, {}),
    "compact AdamW": (tiered.AdamW, {"state": "compact"}),
}


def digests_of_training(directory: str | Path) -> dict[str, str]:
    """Train three steps in each way; return the digests of parameters and optimizer state."""
    return {word: digest_of_training(Path(directory) / word, word) for word in WAYS}


def digest_of_training(directory: Path, word: str) -> str:
    optimizer_class, options = WAYS[word]
    torch.manual_seed(0)
    with tiered.Store(directory, dram="16MiB", durable=False) as store:
        model = tiered.shard(torch.nn.Linear(300, 40), store, param_dtype=torch.bfloat16)
        optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 600).view(2, 300).bfloat16()
            model(x).square().sum().backward()
            optimizer.step()
        seen = list(model.state_dict().values())
        for values in optimizer.state_dict()["state"].values():
            seen += [values[name] for name in sorted(values)]
    digest = hashlib.sha256()
    for value in seen:
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
