"""The archives beside this script: what runs of the second release, commit 2ca5acb, left on people's drives.

This script was run once, on a checkout of that commit, and refuses every other tree; what it made is never made again:

    cd CHECKOUT && PYTHONPATH=$PWD python .../tests/archives/make.py

Each archive is packed as the programs of programs.py left it: the Trainer's was killed in the middle of a step, and the
others ended in good order. expected.json has what that commit read in a copy of each archive.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from programs import (  # this script's folder comes first in the path
    HERE,
    LOOP_STEP,
    LOOPS,
    NAMES,
    STORES,
    TEXT,
    TRAIN,
    Kill,
    exported,
    external_of,
    make_store,
    new_trainer,
    plain_gpt2,
    read_store,
    read_training,
    training_in_json,
    unpack,
)

import tiered
from tiered.tools.cli import main

COMMIT = "2ca5acb8bb64e8be9240b5e4f9af7ce9a6ef7186"


def refuse_another_tree() -> None:
    """End the process unless tiered is imported from an unchanged checkout of the commit."""
    tree = Path(tiered.__file__).parents[1]
    git = ["git", "-C", str(tree)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    if head != COMMIT or changed:
        sys.exit(f"{tree} is at {head}, changed: {changed or 'nothing'}; expected a checkout of {COMMIT}")


def make(name: str, place: Path) -> None:
    """Have the run ``name`` in ``place``."""
    directories = [place / directory for directory in STORES[name]]
    if name == "store":
        make_store(place)
    elif name in TRAIN:
        (place / "data").mkdir()
        (place / "data" / "text.txt").write_bytes(TEXT)
        places = [part for directory in directories for part in ("--store", str(directory))]
        assert main(["train", *TRAIN[name], *places, "--data", str(place / "data"), "--quiet"]) == 0
    elif name == "trainer":
        killed = subprocess.run([sys.executable, __file__, str(place)], check=False)
        assert killed.returncode == -9
    else:
        if name == "lora":
            torch.manual_seed(1)
            plain_gpt2().to(torch.bfloat16).save_pretrained(place / "base")
        with tiered.Store(*directories, dram="32MiB", external=external_of(name, place)) as store:
            LOOPS[name].open(place, store).run(LOOP_STEP)


def pack(name: str, place: Path) -> None:
    """Pack ``place``, with holes in place of zeros that were never written."""
    tar = ["tar", "--create", "--sparse", "--format=gnu", "--sort=name", "--owner=root:0", "--group=root:0"]
    packed = subprocess.run([*tar, "-C", str(place), "."], capture_output=True, check=True).stdout
    small = subprocess.run(["xz", "-9e"], input=packed, capture_output=True, check=True).stdout
    with open(HERE / f"{name}.tar.xz", "xb") as file:
        file.write(small)
    print(f"{name}: {len(small)} bytes", file=sys.stderr)


def read(name: str, place: Path) -> dict[str, Any]:
    """Return what a copy of the archive holds."""
    directories = unpack(name, place)
    external = external_of(name, place)
    found = read_store(directories, external, "r")
    options = [part for path in external for part in ("--external", str(path))]
    assert main(["export", *map(str, directories), str(place / "exported"), *options]) == 0
    found["exported"] = exported(place / "exported")
    if name != "store":
        found |= training_in_json(read_training(name, place))
    if name in LOOPS:
        with tiered.Store(*directories, dram="32MiB", external=external) as store:
            loop = LOOPS[name].open(place, store)
            loop.run(LOOP_STEP + 2)
            found["used"] = loop.used
    return found


def make_all() -> None:
    """Make what is here, and write down what it holds."""
    transformers.utils.logging.disable_progress_bar()
    expected = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as made:
            make(name, Path(made))
            pack(name, Path(made))
        with tempfile.TemporaryDirectory() as copy:
            expected[name] = read(name, Path(copy))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=False) + "\n")


if __name__ == "__main__":
    refuse_another_tree()
    if len(sys.argv) > 1:
        new_trainer(Path(sys.argv[1]), Kill(4)).train()
        sys.exit("the Trainer was not killed")
    make_all()
