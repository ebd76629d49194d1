"""What the parts of scripts/gpu_check share: their arguments, the device, and how figures are said."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.accelerator import simulated
from tests.accelerator.registrar import SimulatedRegistrar
from tiered.bytes.pinned_arena import add_registrar

__all__ = ["part_arguments", "said", "said_of_each", "simulated_device"]


def part_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every part takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path("runs"), help="a folder on the drive, default: runs")
    parser.add_argument("--device", default="auto", help="auto, cuda, ..., or sim")
    parser.add_argument("--tiny", action="store_true", help="sizes of no meaning, to see that all of it runs")
    return parser


def said(figures: dict[str, Any]) -> dict[str, Any]:
    """Print ``figures`` as a JSON line at once, and return them."""
    print(json.dumps(figures), flush=True)
    return figures


def said_of_each(word: str, functions: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    """Say a line of each function's figures under ``word``; one that raises is wrong, and stops no other."""
    for name, function in functions:
        try:
            figures = function()
        except Exception as error:  # of whatever type: the next line is as good without it
            figures = {"wrong": f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
        said({word: name} | figures)


@contextmanager
def simulated_device(word: str) -> Iterator[None]:
    """Enable the tests' device where ``word`` names it; a race ends the process with its words."""
    if word != "sim":
        yield
        return
    simulated.enable()
    add_registrar("sim", SimulatedRegistrar())
    try:
        yield
        if found := simulated.races():
            raise SystemExit(f"races: {found}")
    finally:
        simulated.disable()
