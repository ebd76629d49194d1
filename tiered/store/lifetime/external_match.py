"""Matching: which of the files given are those that the catalog knows by length and header.

Neither tells a model from its fine-tune, and both may be given. Where several files look alike, some of what lies in
them is read, and the digests of its blocks decide.
"""

from __future__ import annotations

import itertools
import mmap
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tiered.bytes.condition import Condition
from tiered.bytes.device.base import Device, IOClass
from tiered.store.format.checksum import num_blocks
from tiered.store.format.root import ExternalFile
from tiered.store.format.row import Row
from tiered.store.transfers.digest_threads import DigestThreads
from tiered.store.transfers.external_read import ExternalRead
from tiered.store.transfers.transfer import SLAB_NBYTES, Progress, Transfer
from tiered.store.waiting.deadline import Deadline

__all__ = ["SlabReads", "find_files"]

_DEADLINE_S = 60.0  # of one read
_MOST_READ = 32  # slabs of a file, for each that it may be: copies of a large model are not read as a whole
_MOST_CHOICES = 16  # for a slab that lies in several files


def find_files(
    needed: Mapping[int, ExternalFile], given: Sequence[ExternalFile], rows: Iterable[Row], reads: SlabReads
) -> dict[int, int]:
    """Return which of the files ``given`` is each of those ``needed``, by number; none for one that is not there.

    ``rows`` lie in them. Where only one given file looks like one that is needed it is not read: other bytes in it are
    found later. Where what is read does not decide, a file of the same name comes first, and then the order given.
    """
    choices: dict[int, list[int]] = {}
    for number, file in needed.items():
        alike = [index for index, each in enumerate(given) if _looks(each) == _looks(file)]
        choices[number] = sorted(alike, key=lambda index: given[index].name != file.name)
    if any(len(each) > 1 for each in choices.values()):
        _narrow(choices, rows, reads)
    found: dict[int, int] = {}
    for number in sorted(choices, key=lambda number: len(choices[number])):
        free = [index for index in choices[number] if index not in found.values()]
        if free:
            found[number] = free[0]
    return found


def _looks(file: ExternalFile) -> tuple[int, int]:
    return file.nbytes, file.header_digest


def _narrow(choices: dict[int, list[int]], rows: Iterable[Row], reads: SlabReads) -> None:
    """Take out of ``choices`` the files that have other bytes, where some have the right ones."""
    num_read: Counter[int] = Counter()
    for row, slab, files in _slabs(rows):
        open_ = [file for file in files if len(choices[file]) > 1 and num_read[file] < _MOST_READ]
        tries = list(itertools.islice(itertools.product(*(choices[file] for file in files)), _MOST_CHOICES + 1))
        if not open_ or len(tries) > _MOST_CHOICES:
            continue
        num_read.update(open_)
        right = [each for each in tries if reads.is_right(row, slab, dict(zip(files, each, strict=True)))]
        for file, indices in zip(files, zip(*right, strict=True), strict=False):  # none where all have other bytes
            choices[file] = [index for index in choices[file] if index in indices]
        if not any(len(choices[file]) > 1 and num_read[file] < _MOST_READ for file in choices):
            return


def _slabs(rows: Iterable[Row]) -> Iterator[tuple[Row, int, list[int]]]:
    """Yield slabs of ``rows`` and the numbers of the files that each lies in: one of each row first, then others."""
    places = [(row, slab) for row in rows for slab in range(num_blocks(row.nbytes, SLAB_NBYTES))]
    random.Random(0).shuffle(places)  # so that the few that are read are from all over the file
    places.sort(key=lambda place: place[1] > 0)
    for row, slab in places:
        start, end = slab * SLAB_NBYTES, (slab + 1) * SLAB_NBYTES
        files = {each.file for each in row.ranges if each.start < end and each.start + each.nbytes > start}
        if files:
            yield row, slab, sorted(files)


class SlabReads:
    """Reads of slabs of external records, to see whether their bytes are in this file or in that."""

    def __init__(self, device: Device, store_uuid: bytes) -> None:
        self._device = device
        self._store_uuid = store_uuid
        self._threads = DigestThreads()  # it starts none: the caller checks

    def is_right(self, row: Row, slab: int, indices: Mapping[int, int]) -> bool:
        """Return whether the slab matches its digests where ``indices`` has the files; blocks. Raises DeadlineError."""
        condition, done = Condition(), list[Transfer]()

        def note(transfer: Transfer) -> None:
            with condition:
                done.append(transfer)
                condition.notify_all()

        transfer = ExternalRead(
            self._device,
            indices,
            self._store_uuid,
            row,
            memory=memoryview(mmap.mmap(-1, SLAB_NBYTES)),  # lifetime: the transfer's, past a deadline too
            io_class=IOClass.DEMAND,
            threads=self._threads,
            progress=Progress(),
            on_done=note,
            first_slab=slab,
            is_checked_by_owner=True,
        )
        transfer.start()
        deadline = Deadline(f"read of {row.name!r}, to tell files apart,", _DEADLINE_S)
        with condition:
            while not done:
                deadline.wait(condition)
        transfer.check()
        return transfer.error is None
