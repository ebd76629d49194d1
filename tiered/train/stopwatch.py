"""Stopwatch: the figures of a step, as the difference of a store's counters before and after it."""

from __future__ import annotations

import time

import tiered
from tiered.stats import StoreStatistics, WorkStatistics
from tiered.store.waiting.recorder import CALLER
from tiered.tiers.device_clock import COMPUTE, UPDATE
from tiered.train.progress import StepRecord

__all__ = ["Stopwatch", "updates_on_device"]


class Stopwatch:
    """Measures one step after the other, from its making or the last ``lap`` on; used by the training thread alone."""

    def __init__(self, store: tiered.Store) -> None:
        self._store = store
        self._before = store.statistics()
        self._begun_s = time.perf_counter()

    def lap(self, step: int, loss: float, num_tokens: int) -> StepRecord:
        """Return the record of the step that ends now."""
        now, before = self._store.statistics(), self._before
        end_s = time.perf_counter()
        waits = _differences(_waits(before), _waits(now))
        record = StepRecord(
            step=step,
            loss=loss,
            seconds=end_s - self._begun_s,
            num_tokens=num_tokens,
            read_bytes=now.read_bytes - before.read_bytes,
            write_bytes=_written(now) - _written(before),
            stall_seconds=sum(waits.values()),
            waits=waits,
            moved=_moved(before, now),
            update_seconds=_update_seconds(now) - _update_seconds(before),
            device_busy_seconds=now.recorder.device_busy_seconds - before.recorder.device_busy_seconds,
            copied=_copied(before, now),
            copy_seconds=_copy_seconds(before, now),
        )
        self._before, self._begun_s = now, end_s
        return record


def _waits(counters: StoreStatistics) -> dict[str, float]:
    """Return how long the training thread has waited; on a compute device, how long its stream stood idle for that."""
    recorder = counters.recorder
    return recorder.waits_of(CALLER if recorder.device is None else COMPUTE)


def updates_on_device(counters: StoreStatistics) -> bool:
    """Return whether buckets were updated on a compute device's stream."""
    return any(each.who == UPDATE for each in _updates(counters))


def _updates(counters: StoreStatistics) -> list[WorkStatistics]:
    return [each for each in counters.recorder.work if each.word == "update bucket"]


def _update_seconds(counters: StoreStatistics) -> float:
    """Return how long buckets were updated: on the device's stream, if that is where, else by threads."""
    is_on_device = updates_on_device(counters)
    return sum(each.seconds for each in _updates(counters) if not is_on_device or each.who == UPDATE)


def _copied(before: StoreStatistics, now: StoreStatistics) -> tuple[int, int]:
    """Return the bytes copied to a compute device and back between two snapshots."""
    here, there = now.recorder.device, before.recorder.device
    if here is None or there is None:
        return 0, 0
    return here.copied_in_bytes - there.copied_in_bytes, here.copied_out_bytes - there.copied_out_bytes


def _copy_seconds(before: StoreStatistics, now: StoreStatistics) -> tuple[float, float]:
    into, out = (
        now.recorder.seconds_of(word) - before.recorder.seconds_of(word) for word in ("copy in", "copy out")
    )
    return into, out


def _written(counters: StoreStatistics) -> int:
    return counters.write_bytes + counters.catalog_write_bytes


def _differences(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _moved(before: StoreStatistics, now: StoreStatistics) -> dict[str, tuple[int, int]]:
    """Return the bytes read and written between two snapshots, by class, the catalog's included."""
    old = {moved.name: moved for moved in before.recorder.moved}
    found = {
        moved.name: (
            moved.read_bytes - (old[moved.name].read_bytes if moved.name in old else 0),
            moved.write_bytes - (old[moved.name].write_bytes if moved.name in old else 0),
        )
        for moved in now.recorder.moved
    }
    found["catalog"] = (0, now.catalog_write_bytes - before.catalog_write_bytes)
    return found
