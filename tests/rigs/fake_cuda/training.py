"""One training on the fake CUDA as a process: the rig's checks run it, kill it, and read its last line."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch

import tiered
from tests.accelerator.training import case_on
from tests.reference import Recipe, Trained
from tests.rigs.fake_cuda import device
from tests.zero.training import reference, start

__all__ = ["main"]


class _Watch:
    """What the training did to the process: the stages after which another device was the current one."""

    def __init__(self) -> None:
        self.begun_on = torch.cuda.current_device()
        self.moved: list[str] = []

    def look(self, stage: str) -> None:
        if torch.cuda.current_device() != self.begun_on:
            self.moved.append(stage)
            torch.cuda.set_device(self.begun_on)

    def tell(self, trained: Trained) -> None:
        values = b"".join(value.cpu().numpy().tobytes() for value in trained.parameters.values())
        found = {"digest": hashlib.sha256(values).hexdigest(), "contexts": device.contexts(), "moved": self.moved}
        print(json.dumps(found | {"complaints": device.complaints()}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="of the store; without one plain PyTorch trains")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--is-current", action="store_true", help="make it the current device first, as a rank does")
    parser.add_argument("--update-on", default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Train to the end, from the store's last commit on; each commit's step is a line, the last line is JSON."""
    arguments = _arguments()
    if arguments.is_current:
        torch.cuda.set_device(arguments.device)
    watch = _Watch()
    case, recipe = case_on(arguments.device, "gpt"), Recipe(num_steps=arguments.steps)
    if arguments.directory is None:
        watch.tell(reference(case, recipe))
        return
    options = {"device": arguments.device, "update_on": arguments.update_on, "hold": 0}
    with tiered.Store(arguments.directory, dram="24MiB", device_memory="24MiB") as store:
        session = start(case, recipe, store, **options)
        watch.look("shard")
        for step in range(store.resume().get("step", 0), arguments.steps):
            session.run_step(step)
            watch.look("step")
            store.commit({"step": step + 1}, wait=False)
            print(f"step {step + 1}", flush=True)
        store.wait_for_commit()
        trained = session.collect()
        watch.look("state_dict")
    watch.look("close")
    watch.tell(trained)


if __name__ == "__main__":
    main()
