"""Time limits that strike calls of a store and training steps at any line, for some minutes, and what is left then.

usage: python bench/storm.py [--minutes 10] [--seed 0] [--directory DIR]

Half of the limits are actions of SIGALRM, half are raised by another thread (PyThreadState_SetAsyncExc). After each one
the store must hold what it held before or after the call, whole, or refuse all but close and hold, opened again, what
was committed; a training goes on, after a rollback or a resume, with the losses of one that was never struck. The last
line is one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import tiered

__all__: list[str] = []

_SIZES = (100, 5_000, 70_000, 300_000, 2_000_000)
_NUM_KEYS = 12
_NUM_STEPS = 6

Contents = dict[str, torch.Tensor]


class TimeLimit(Exception):
    """What a limit raises."""


class Limits:
    """``run(call)`` makes a call with a time limit; it returns whether the limit struck."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._is_armed = False
        self._is_over = True
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._strike, args=(threading.get_ident(),), daemon=True).start()
        signal.signal(signal.SIGALRM, self._act)

    def _act(self, number: int, frame: object) -> None:
        if self._is_armed:
            raise TimeLimit

    def run(self, call: Callable[[], object], most_s: float) -> str:
        """Make ``call``; return "" or how it was struck. Its other errors are raised."""
        after_s = self._draws.random() ** 3 * most_s + 1e-6
        how = self._draws.choice(("signal", "thread"))
        try:
            return self._by_signal(call, after_s) if how == "signal" else self._by_thread(call, after_s)
        except TimeLimit:
            self._is_armed = False
            return how
        except (tiered.CapacityError, tiered.DeviceError) as error:
            if "did not begin" not in str(error):
                raise
            return "a thread that was starting"  # which CPython takes for the one that starts it

    def _by_signal(self, call: Callable[[], object], after_s: float) -> str:
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            call()
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return ""

    def _by_thread(self, call: Callable[[], object], after_s: float) -> str:
        self._is_over = False
        self._orders.put(after_s)
        try:
            call()
        finally:
            with self._lock:
                self._is_over = True
        for _ in range(1000):  # it comes at a jump backwards
            pass
        return ""

    def _strike(self, thread: int) -> None:
        while True:
            time.sleep(self._orders.get())
            with self._lock:
                if not self._is_over:
                    self._is_over = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimit))


class Storm:
    """A store that calls are made of, and what it may hold."""

    def __init__(self, folder: Path, seed: int, limits: Limits) -> None:
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._draws = random.Random(seed)
        self._limits = limits
        self._num = 0
        self._store = self._open()
        for i in range(_NUM_KEYS):
            self._store[f"k{i}"] = self._value()
        self._store.commit({})
        self._now: Contents = self._contents()
        self._committed = [dict(self._now)]

    def _open(self) -> tiered.Store:
        return tiered.Store(self._folder, dram="8MiB", device_memory=0)

    def close(self) -> None:
        self._store.close(commit=False)

    def _value(self) -> torch.Tensor:
        self._num += 1
        return torch.full((self._draws.choice(_SIZES),), self._num % 251, dtype=torch.uint8)

    def _contents(self) -> Contents:
        return {key: self._store[key] for key in sorted(self._store)}

    def turn(self) -> None:
        """Make one call that is struck or not, and look at what the store holds then."""
        key, value = f"k{self._draws.randrange(_NUM_KEYS)}", self._value()
        name = self._draws.choice(("put", "get", "part", "read", "rw", "delete", "many", "commit", "rollback", "look"))
        before, after = dict(self._now), dict(self._now)
        call = self._call(name, key, value, after)
        self.counts["calls"] += 1
        if name == "commit":  # so that its generation tells whether it came
            self._store.wait_for_commit()
            self._committed = self._committed[-1:]
        generation = self._store.generation
        struck = self._limits.run(call, 0.01)
        self.counts[f"struck by {struck}"] += bool(struck)
        committing = [after] if name == "commit" else []
        if not struck:
            self._now = after
            if committing:  # without wait=True the one before is what a store holds that is cut short meanwhile
                self._committed = [*self._committed[-1:], after] if self._is_deferred() else [after]
            return
        expected = [before, after]
        if name == "many":  # in order
            expected = self._many_states(before, after)
        try:
            if committing:
                self._store.wait_for_commit()
                self._committed = committing if self._store.generation > generation else self._committed
            found = self._contents()
        except tiered.UsageError as error:
            self._reopen(error, self._committed + committing, name)
            return
        self._now = self._match(found, expected, name)

    def _many_states(self, before: Contents, after: Contents) -> list[Contents]:
        states = [before]
        for key in sorted(after):
            if after[key] is not before.get(key):
                states.append(states[-1] | {key: after[key]})
        return states

    def _call(self, name: str, key: str, value: torch.Tensor, after: Contents) -> Callable[[], object]:
        store = self._store
        if name == "put" or (key not in after and name in ("get", "part", "read", "rw", "look", "delete")):
            after[key] = value
            return lambda: store.__setitem__(key, value)
        if name == "get":
            return lambda: store.get(key, out=torch.empty_like(after[key]))
        if name == "part":
            part = value[: self._draws.randrange(1, len(after[key]) + 1)]
            start = self._draws.randrange(len(after[key]) - len(part) + 1)
            after[key] = after[key].clone()
            after[key][start : start + len(part)] = part
            return lambda: store.write_part(key, start, part)
        if name == "read":
            stop = self._draws.randrange(len(after[key]) + 1)
            return lambda: store.read_part(key, 0, stop)
        if name == "rw":
            after[key] = after[key].clone().fill_(value[0])
            return lambda: self._write(key, value[0])
        if name == "delete":
            del after[key]
            return lambda: store.__delitem__(key)
        if name == "many":
            values = {f"k{i}": self._value() for i in range(0, _NUM_KEYS, 2)}
            values = dict(sorted(values.items()))
            after |= values
            return lambda: store.put_many(values)
        if name == "commit":
            return lambda: store.commit({"num": self._num}, wait=not self._is_deferred())
        if name == "rollback":
            after.clear()
            after.update(self._committed[-1])
            return self._roll_back
        return lambda: self._look(key)

    def _is_deferred(self) -> bool:
        """Whether the commit of this turn becomes durable in the background."""
        return self._num % 3 == 0

    def _roll_back(self) -> None:
        self._store.rollback()

    def _write(self, key: str, number: torch.Tensor) -> None:
        with self._store.lease(key, mode="rw") as view:
            view.fill_(number)

    def _look(self, key: str) -> None:
        with self._store.lease(key) as view:
            view.sum()

    def _match(self, found: Contents, expected: list[Contents], name: str) -> Contents:
        for each in expected:
            if found.keys() == each.keys() and all(torch.equal(found[key], each[key]) for key in each):
                return each
        missing = sorted(set(expected[0]) - set(found))
        wrong = [k for k in found if not any(k in e and torch.equal(found[k], e[k]) for e in expected)]
        if name == "rw" and not missing and len(wrong) == 1:  # the caller's own write, which was cut short
            return found
        self.counts["lost"] += len(missing)
        self.counts["wrong"] += 1
        print(f"WRONG after {name}: missing {missing}, wrong {wrong}", flush=True)
        return found

    def _reopen(self, error: tiered.UsageError, committed: list[Contents], name: str) -> None:
        self.counts["refused"] += 1
        if "cut short" not in str(error):
            self.counts["wrong"] += 1
            print(f"WRONG after {name}: refused by {error}", flush=True)
        self._store.close()
        self._store = self._open()
        if not self._store.verify().is_clean:
            self.counts["wrong"] += 1
        self._now = self._match(self._contents(), committed, f"{name}, reopened")
        self._committed = [dict(self._now)]


class Training:
    """A small model that is trained, struck, and trained on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.losses: dict[int, float] = {}
        self.open()

    def open(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1)] * 3
        self._store = tiered.Store(self._folder, dram="8MiB", device_memory=0)
        self._model = tiered.shard(torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)), self._store)
        self._optimizer = tiered.AdamW(self._model.parameters(), lr=1e-2)
        self.step = self._store.resume().get("step", 0)
        if not self._store.generation:
            self._store.commit({"step": 0})

    def run_step(self) -> None:
        inputs = torch.full((4, 64), float(self.step % 7), requires_grad=False)
        loss = self._model(inputs).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._store.commit({"step": self.step + 1})
        self.losses[self.step] = float(loss.detach())
        self.step += 1

    def recover(self, counts: Counter[str]) -> None:
        try:
            self.step = self._store.resume()["step"]
        except tiered.UsageError as error:
            counts["training refused"] += 1
            if "cut short" not in str(error):
                counts["wrong"] += 1
                print(f"WRONG after a step: refused by {error}", flush=True)
            self._store.close()
            self.open()

    def close(self) -> None:
        self._store.close(commit=False)


def _train(folder: Path, limits: Limits | None, counts: Counter[str]) -> dict[int, float]:
    training = Training(folder)
    while training.step < _NUM_STEPS:
        struck = ""
        if limits is None:
            training.run_step()
        else:
            struck = limits.run(training.run_step, 0.1)
        counts["steps"] += 1
        if struck:
            counts["steps struck"] += 1
            training.recover(counts)
    training.close()
    return training.losses


def main() -> int:
    """Run the storm; return 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="where to work (default: the temporary directory)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(dir=args.directory, prefix=".tiered-bench-"))
    limits, counts = Limits(random.Random(args.seed)), Counter[str]()
    end = time.monotonic() + 60 * args.minutes
    losses = _train(folder / "undisturbed", None, Counter())
    number = 0
    while time.monotonic() < end:
        number += 1
        storm = Storm(folder / f"store{number}", args.seed + number, limits)
        for _ in range(400):
            storm.turn()
        storm.close()
        counts += storm.counts
        found = _train(folder / f"training{number}", limits, counts)
        if {step: losses[step] for step in found} != found:
            counts["wrong"] += 1
            print(f"WRONG losses: {found}, expected {losses}", flush=True)
        for name in (f"store{number}", f"training{number}"):
            shutil.rmtree(folder / name)
    shutil.rmtree(folder)
    result = {"bench": "storm", "minutes": args.minutes, "seed": args.seed, "lost": 0, "wrong": 0, **counts}
    print(json.dumps(result))
    return 1 if counts["lost"] or counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
