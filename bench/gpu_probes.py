#!/usr/bin/env python3
"""What the engine assumes of a card and no document promises, asked of the card itself, without a model.

Usage: python bench/gpu_probes.py [--device cuda --tiny]

Each probe is a JSON line; "wrong" says which assumption does not hold. How fast something is is never wrong, nor
whether a copy across two page-locked pieces is refused: the engine cuts such copies either way. Probes that may leave
an error behind come last.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import psutil
import torch
from torch import Tensor

from bench.gpu_device import part_arguments, said_of_each, simulated_device
from tiered.bytes.pinned_arena import Registrar, registrar_for
from tiered.units import KiB, MiB
from tiered.zero.compute_device import named_device

NUM_PIECES = 4
NUMELS = (1, 1000, 65_535, 65_536, 65_537, 1_000_000, 16_777_216, 33_554_433)  # around and beyond torch's chunks
ENDINGS = (RuntimeError, AssertionError, OSError, torch.AcceleratorError)


class Pieces:
    """Host memory that is page-locked in ``NUM_PIECES`` registrations beside each other, as an arena's is."""

    def __init__(self, piece_nbytes: int, registrar: Registrar, device_index: int, *, huge: bool) -> None:
        self.piece_nbytes = piece_nbytes
        self.registrar = registrar
        self.device_index = device_index
        self.mapping = mmap.mmap(-1, NUM_PIECES * piece_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.seconds: list[float] = []

    def __enter__(self) -> Pieces:
        self.seconds = []
        for index in range(NUM_PIECES):
            begun_s = time.perf_counter()
            self.lock(index)
            self.seconds.append(time.perf_counter() - begun_s)
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(len(self.seconds)):
            self.registrar.unregister(self.address(index), self.device_index)

    def lock(self, index: int) -> None:
        """Page-lock one piece."""
        self.registrar.register(self.address(index), self.piece_nbytes, self.device_index)

    def address(self, index: int) -> int:
        return int(self.bytes.data_ptr()) + index * self.piece_nbytes


class Probes:
    """The probes of one device."""

    def __init__(self, device: torch.device, *, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self.piece_nbytes = 1 * MiB if tiny else min(1024, psutil.virtual_memory().available // (16 * MiB)) * MiB
        registrar = registrar_for(device.type)
        if registrar is None:
            raise SystemExit(f"no registrar is known for {device}")
        self.registrar = registrar
        self.pieces = Pieces(self.piece_nbytes, registrar, device.index or 0, huge=True)

    def all(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        yield "registration", self.registration
        yield "rates", self.rates
        yield "costs", self.costs
        yield "norms", self.norms
        yield "optimizers", self.optimizers
        yield "copy across two pieces", self.copy_across
        yield "registered twice", self.registered_twice

    def run(self) -> None:
        """Say each probe's line; one that fails stops no other."""
        self.answers()  # sets the device up, which no figure below is to contain
        torch.empty(1, pin_memory=True)  # before, torch says of no memory that it is page-locked
        said_of_each("probe", self.all())

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def answers(self) -> bool:
        """Return whether the device still computes, and without an error of an earlier call."""
        return float(torch.ones(8, device=self.device).sum()) == 8.0

    # -- page-locked memory

    def registration(self) -> dict[str, Any]:
        """Time the registration of pages of both sizes; all of the memory must be known as pinned."""
        with Pieces(self.piece_nbytes, self.registrar, self.device.index or 0, huge=False) as small:
            pass
        with self.pieces as pieces:
            views = pieces.bytes[:16], pieces.bytes[pieces.piece_nbytes + 64 :][:1000], pieces.bytes[-1:]
            are_pinned = [view.is_pinned() for view in views]
        wrong = {} if all(are_pinned) else {"wrong": f"views of registered memory are pinned: {are_pinned}"}
        per_gib = 1024 * MiB / self.piece_nbytes
        return {
            "huge_pages_s_per_gib": [s * per_gib for s in pieces.seconds],
            "small_pages_s_per_gib": [s * per_gib for s in small.seconds], "are_pinned": are_pinned,
        } | wrong  # fmt: skip

    def copy_across(self) -> dict[str, Any]:
        """Copy across the border of two pieces, both ways: refused, or with the right bytes."""
        found: dict[str, Any] = {}
        with self.pieces as pieces:
            span = pieces.bytes[pieces.piece_nbytes - 128 * KiB :][: 256 * KiB]
            expected = (torch.arange(span.numel()) % 251).to(torch.uint8)
            span.copy_(expected)
            there = torch.zeros_like(span, device=self.device)
            for name, copy in (
                ("in", lambda: there.copy_(span, non_blocking=True)),
                ("out", lambda: span.copy_(there, non_blocking=True)),
            ):
                try:
                    copy()
                    self.synchronize()
                    found[name] = "done"
                except ENDINGS as error:
                    found[name] = f"refused: {' '.join(str(error).split())[:200]}"
            if found["in"] == found["out"] == "done" and not torch.equal(there.cpu(), expected):
                found["wrong"] = "a copy across two pieces is neither refused nor right"
            found["answers_afterwards"] = self.answers()
        return found

    def registered_twice(self) -> dict[str, Any]:
        """Register one piece twice: refused, and no later call tells of it."""
        with self.pieces as pieces:
            try:
                pieces.lock(1)
                return {"wrong": "a piece that is registered was registered once more"}
            except Exception as error:  # of whatever type a registrar has
                refusal = f"{type(error).__name__}: {error}"
            try:
                is_cleared = self.answers()
            except ENDINGS as error:
                return {"refusal": refusal, "wrong": f"the refusal was told again by a later call: {error}"}
        return {"refusal": refusal, "is_cleared": is_cleared}

    # -- how fast

    def rates(self) -> dict[str, Any]:
        """Measure copies in, out and both at once, bytes a second, by the kind of host memory and the size."""
        found = {}
        with self.pieces as pieces:
            for nbytes in (64 * KiB, 256 * KiB) if self.tiny else (1 * MiB, 16 * MiB, 256 * MiB):
                kinds = {
                    "registered": (pieces.bytes[:nbytes], pieces.bytes[pieces.piece_nbytes :][:nbytes]),
                    "pinned": [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)],
                    "pageable": [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)],
                }
                for kind, (source, target) in kinds.items():
                    found[f"{kind} {nbytes // KiB} KiB"] = self.rates_of(source, target)
        return {"bytes_per_s": found}

    def rates_of(self, source: Tensor, target: Tensor) -> dict[str, float]:
        there, back = (torch.ones_like(source, device=self.device) for _ in range(2))
        into, out = (torch.Stream(device=self.device) for _ in range(2))
        times = 2 if self.tiny else max(4, min(64, 512 * MiB // source.numel()))
        found = {}
        for name, streams in (("in", [into]), ("out", [out]), ("both", [into, out])):
            for num in (1, times):  # the first warms up
                self.synchronize()
                begun_s = time.perf_counter()
                for _ in range(num):
                    for stream in streams:
                        with stream:
                            if stream is into:
                                there.copy_(source, non_blocking=True)
                            else:
                                target.copy_(back, non_blocking=True)
                self.synchronize()
            found[name] = len(streams) * times * source.numel() / (time.perf_counter() - begun_s)
        return found

    def costs(self) -> dict[str, Any]:
        """Measure what calls cost the thread that makes them, in microseconds."""
        stream, event = torch.Stream(device=self.device), torch.Event(device=self.device)
        current = torch.accelerator.current_stream(self.device)
        one = torch.ones(1, device=self.device)

        def switch() -> None:
            torch.accelerator.set_stream(stream)
            torch.accelerator.set_stream(current)

        calls = {
            "record": lambda: event.record(current), "query": event.query, "wait": lambda: stream.wait_event(event),
            "new event and record": lambda: torch.Event(device=self.device).record(current),
            "switch there and back": switch, "kernel": lambda: one.add_(1),
        }  # fmt: skip
        found = {}
        num = 50 if self.tiny else 2000
        for name, call in calls.items():
            call()
            self.synchronize()
            begun_s = time.perf_counter()
            for _ in range(num):
                call()
            found[name] = 1e6 * (time.perf_counter() - begun_s) / num
            self.synchronize()
        return {"microseconds": found}

    # -- bits

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        numels = NUMELS[:5] if self.tiny else NUMELS
        return [torch.randn(numel, generator=generator).to(self.device) for numel in numels]

    def norms(self) -> dict[str, Any]:
        """Compare the norms of torch's clipping with those of one tensor each; either may be what a card has."""
        tensors = self.tensors()
        together = [value.cpu() for value in torch._foreach_norm(tensors, 2.0)]
        alone = [torch._foreach_norm([tensor], 2.0)[0].cpu() for tensor in tensors]
        by_vector = [torch.linalg.vector_norm(tensor).cpu() for tensor in tensors]
        found: dict[str, Any] = {
            "numels": [tensor.numel() for tensor in tensors],
            "vector_norm_has_the_bits_of_foreach": list(map(torch.equal, by_vector, together)),
        }
        if not all(map(torch.equal, alone, together)):
            found["wrong"] = "a tensor's norm in a list has other bits than the same tensor's alone"
        return found

    def optimizers(self) -> dict[str, Any]:
        """Compare an optimizer's fused and foreach updates of a list with those of each tensor alone, and of a view."""
        found: dict[str, Any] = {}
        for name in ("AdamW", "SGD"):
            for kind in ("fused", "foreach"):
                options = {kind: True, "lr": 1e-2, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
                together = self.updated(name, options, one_by_one=False)
                alone = self.updated(name, options, one_by_one=True)
                plain = self.updated(name, options | {kind: False}, one_by_one=False)
                found[f"{name} {kind}"] = {
                    "list_as_alone": all(map(torch.equal, together, alone)),
                    "as_for_loop": all(map(torch.equal, together, plain)),
                }
                if kind == "fused" and not found[f"{name} {kind}"]["list_as_alone"]:
                    found["wrong"] = f"fused {name} gives a list other bits than its tensors alone"
        return found

    def updated(self, name: str, options: dict[str, Any], *, one_by_one: bool) -> list[Tensor]:
        values = [torch.nn.Parameter(tensor) for tensor in self.tensors()]
        groups = [[value] for value in values] if one_by_one else [values]
        optimizers = [getattr(torch.optim, name)(group, **options) for group in groups]
        for value in values:
            value.grad = value.detach() * 0.5
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
        return [value.detach() for value in values]


def main() -> None:
    args = part_arguments(__doc__).parse_args()
    with simulated_device(args.device):
        Probes(named_device(args.device), tiny=args.tiny).run()


if __name__ == "__main__":
    main()
