"""Trains a classifier of handwritten digits over ranks; with --plain in plain torch, to the same bits.

    torchrun --nproc-per-node 2 scripts/examples/digits_over_ranks.py [--plain] [--epochs 8] [--store DIR]

Rank 0 prints one line of JSON: the accuracy on held-out digits, and a digest of the losses of all steps and ranks. A
run that is started again goes on from its last commit, to the same digest; without --store nothing is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tiered

NUM_HELD_OUT = 360


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="in plain torch, without tiered")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--store", help="a directory on an NVMe drive, where the run is kept")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels, labels = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    data = TensorDataset(pixels[NUM_HELD_OUT:], labels[NUM_HELD_OUT:])
    held_out = pixels[:NUM_HELD_OUT], labels[:NUM_HELD_OUT]
    torch.manual_seed(0)  # the same model on all ranks
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if args.plain:
        losses, accuracy = train_plain(model, data, held_out, args.epochs)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            losses, accuracy = train(model, data, held_out, args.epochs, args.store or f"{scratch}/{{rank}}")
    of_ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, losses)
    if dist.get_rank() == 0:
        digest = hashlib.sha256(json.dumps(of_ranks).encode()).hexdigest()[:16]
        print(json.dumps({"accuracy": accuracy, "steps": len(losses), "last_loss": losses[-1], "digest": digest}))
    dist.destroy_process_group()


def train(
    model: nn.Module, data: TensorDataset, held_out: tuple[Tensor, Tensor], num_epochs: int, directory: str
) -> tuple[list[float], float]:
    """Train with tiered; return this rank's losses, and the accuracy of all ranks."""
    with tiered.Store(directory, dram="64MiB") as store:
        model = tiered.shard(model, store)
        torch.set_num_threads(1)  # as the plain run has: how threads divide a sum shows in its bits
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        sampler = DistributedSampler(data, drop_last=True)  # as many batches, and other ones, on each rank
        loader = tiered.resumable(DataLoader(data, batch_size=64, sampler=sampler))
        store.register("loader", loader)
        losses = store.resume().get("losses", [])
        for epoch in range(loader.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                loss.backward()  # the ranks' gradients are added here
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            store.commit({"losses": losses}, wait=False)
        return losses, accuracy_of(model, held_out)


def train_plain(
    model: nn.Module, data: TensorDataset, held_out: tuple[Tensor, Tensor], num_epochs: int
) -> tuple[list[float], float]:
    """Do what ``train`` does, with a whole model on each rank."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    losses = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            for parameter in model.parameters():
                of_ranks = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
                dist.all_gather(of_ranks, parameter.grad)
                parameter.grad = sum(of_ranks[1:], of_ranks[0]) * (1 / len(of_ranks))  # in the order of the ranks
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, accuracy_of(model, held_out)


@torch.no_grad()
def accuracy_of(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    """Return the share of held-out digits that are recognised: each rank looks at its part, all together."""
    model.eval()
    x, y = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in held_out)
    num_right = (model(x).argmax(1) == y).sum()
    dist.all_reduce(num_right)
    model.train()
    return num_right.item() / len(held_out[0])


if __name__ == "__main__":
    main()
