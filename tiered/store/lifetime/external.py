"""ExternalSources: the user's own files that records may lie in, named by the caller each time the store is opened.

The catalog knows them by length and header, not by their path: so a folder may move, and no path is ever taken from
data. Neither tells a model from its fine-tune, and both may be given. Where several files look alike, some of what lies
in them is read, and the digests of its blocks decide; the first commit has all of these digests.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from tiered.bytes.condition import Condition
from tiered.bytes.device.base import Device, IOClass
from tiered.bytes.device.engines import open_external
from tiered.bytes.device.external_files import refuse_one_path
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import UsageError
from tiered.store.format.checksum import num_blocks
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import ExternalFile, Root
from tiered.store.format.row import Row
from tiered.store.format.safetensors_header import HeaderEntry, SafetensorsHeader, read_header
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Progress, Transfer
from tiered.store.transfers.digest_threads import DigestThreads
from tiered.store.transfers.external_read import ExternalRead
from tiered.store.waiting.deadline import Deadline
from tiered.units import format_bytes

__all__ = ["ExternalSources"]


_DEADLINE_S = 60.0  # of one read
_MOST_READ = 32  # slabs of a file, for each that it may be: copies of a large model are not read as a whole

IsRight = Callable[[Row, int, dict[int, int]], bool]
"""Whether a slab of a row matches its digests where the numbered files have these places on the device."""


def _find_files(
    needed: Mapping[int, ExternalFile], given: Sequence[ExternalFile], rows: Sequence[Row], is_right: IsRight
) -> dict[int, int]:
    """Return which of the files ``given`` is each of those ``needed``, by number; none for one that is not there.

    ``rows`` lie in them. Where only one given file looks like one that is needed it is not read: other bytes in it are
    found later. Where what is read does not decide, a file of the same name comes first, and then the order given.
    """
    choices: dict[int, list[int]] = {}
    for number, file in needed.items():
        alike = [index for index, each in enumerate(given) if _looks(each) == _looks(file)]
        if len(alike) > 1:
            slabs = _some_slabs(rows, number)
            right = [index for index in alike if all(is_right(row, slab, {number: index}) for row, slab in slabs)]
            alike = right or alike
        choices[number] = sorted(alike, key=lambda index: given[index].name != file.name)
    found: dict[int, int] = {}
    for number in sorted(choices, key=lambda number: len(choices[number])):
        free = [index for index in choices[number] if index not in found.values()]
        if free:
            found[number] = free[0]
    return found


def _looks(file: ExternalFile) -> tuple[int, int]:
    return file.nbytes, file.header_digest


def _some_slabs(rows: Iterable[Row], number: int) -> list[tuple[Row, int]]:
    """Return slabs of ``rows`` that lie in the file ``number`` and in no other, a few from all over the file."""
    found = []
    for row in rows:
        for slab in range(
            num_blocks(row.nbytes, SLAB_NBYTES) if any(each.file == number for each in row.ranges) else 0
        ):
            start, end = slab * SLAB_NBYTES, (slab + 1) * SLAB_NBYTES
            files = {each.file for each in row.ranges if each.start < end and each.start + each.nbytes > start}
            if files == {number}:
                found.append((row, slab))
    return random.Random(0).sample(found, min(len(found), _MOST_READ))


def _reads_of(device: Device, store_uuid: bytes) -> IsRight:
    """Return a function that reads a slab; it blocks, and raises DeadlineError."""
    threads = DigestThreads()  # it starts none: the caller checks

    def is_right(row: Row, slab: int, indices: dict[int, int]) -> bool:
        condition, done = Condition(), list[Transfer]()

        def note(transfer: Transfer) -> None:
            with condition:
                done.append(transfer)
                condition.notify_all()

        transfer = ExternalRead(
            device,
            indices,
            store_uuid,
            row,
            memory=memoryview(mmap.mmap(-1, SLAB_NBYTES)),  # lifetime: the transfer's, past a deadline too
            io_class=IOClass.DEMAND,
            threads=threads,
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

    return is_right


# -- external ----------------------------------------------------------------------------------------------------------


class ExternalSources:
    """Safetensors files that are open to be read in place.

    The catalog numbers those that records lie in, in the order in which they were first used; a number is free for
    another file when no record of the generation that was opened lies there. ``indices`` has the place of each numbered
    file in ``device``.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], engine: str) -> None:
        """Open ``paths``, files or folders of them; blocks for reads of each. UsageError, DeviceError, TypeError."""
        refuse_one_path(paths)
        found = {os.path.realpath(path): path for given in paths for path in reversed(_files_of(given))}
        self._paths = sorted(found.values(), key=[path for given in paths for path in _files_of(given)].index)
        self._known = {each: index for index, path in enumerate(self._paths) for each in (os.path.realpath(path), path)}
        self._headers: list[SafetensorsHeader] = []
        self._identities: list[ExternalFile] = []
        self.files: tuple[ExternalFile, ...] = ()  # as the catalog numbers them
        self.indices: dict[int, int] = {}
        self._free: list[int] = []  # numbers of files that no record lies in
        self._device: FileDevice | None = None
        if self._paths:
            self._device = open_external(self._paths, "auto" if engine == "memory" else engine)
            try:
                self._read_headers(self._device)
            except BaseException:
                self._device.close()
                raise

    def _read_headers(self, device: FileDevice) -> None:
        """Read the headers of the files that are open: their paths may lead to others by now."""
        for index, path in enumerate(self._paths):
            header = read_header(path, device.descriptor(index))
            self._headers.append(header)
            name, nbytes = os.path.basename(path), device.external.nbytes(index)
            self._identities.append(ExternalFile(name, nbytes, header.digest))

    def match(self, root: Root, rows: CommittedRows) -> None:
        """Find the files that ``rows`` lie in among those given, by their looks and, where these are alike, by bytes.

        All others that the catalog has are forgotten, and their numbers are free. Raises UsageError for a file that is
        missing or changed.
        """
        external = list(rows.external()) if root.external else []
        needed = {each.file for row in external for each in row.ranges}
        self.files = root.external[: max(needed, default=-1) + 1]
        self._free = [number for number in range(len(self.files)) if number not in needed]
        if needed and self._device is not None:
            files = {number: self.files[number] for number in sorted(needed)}
            is_right = _reads_of(self._device, root.store_uuid)
            self.indices.update(_find_files(files, self._identities, external, is_right))
        missing = needed - self.indices.keys()
        if missing:
            raise self._missing(self.files[min(missing)])

    def _missing(self, file: ExternalFile) -> UsageError:
        """Return the error for ``file``, which no given file looks like."""
        free = [index for index in range(len(self._paths)) if index not in self.indices.values()]
        namesakes = [index for index in free if self._identities[index].name == file.name]
        if namesakes:
            got, path = self._identities[namesakes[0]], self._paths[namesakes[0]]
            return UsageError(
                f"{path} is another file than the store's records lie in: expected {file.nbytes:,} bytes"
                f"{'' if got.nbytes != file.nbytes else ' with another header'}, got {got.nbytes:,}; give the file that"
                " the store was made with"
            )
        given = f"given: {', '.join(self._paths)}" if self._paths else "none was given"
        return UsageError(
            f"records of the store lie in the file {file.name!r} of {format_bytes(file.nbytes)}, which is missing; "
            f'{given}. Open the store with external=["/path/to/{file.name}"] (a command: --external PATH)'
        )

    @property
    def device(self) -> Device | None:
        """The device of all files; None where there are none."""
        return self._device

    @property
    def paths(self) -> list[str]:
        """The files' paths, in the order given."""
        return list(self._paths)

    def find(self, path: str | os.PathLike[str], name: str) -> HeaderEntry:
        """Return the entry of ``name`` in the file at ``path``. Raises UsageError."""
        return self._headers[self._index(path)].entry(name)

    def number(self, path: str | os.PathLike[str]) -> int:
        """Return the number of the file at ``path``, a new one if it has none; under the store's lock. UsageError."""
        index = self._index(path)
        for number, each in self.indices.items():
            if each == index:
                return number
        number = self._free.pop(0) if self._free else len(self.files)
        self.files = (*self.files[:number], self._identities[index], *self.files[number + 1 :])
        self.indices[number] = index
        return number

    def _index(self, path: str | os.PathLike[str]) -> int:
        index = self._known.get(os.fspath(path))
        if index is None:  # order: a real path takes a call to the system for each of its parts
            index = self._known.get(os.path.realpath(path))
        if index is None:
            raise UsageError(f"{path} is not among the files that the store was opened with: give it in external=[...]")
        return index

    def changed(self) -> str | None:
        """Return in what way a file has changed since it was opened, or None."""
        return None if self._device is None else self._device.external.changed(ignores_ctime=True)

    def lost(self) -> dict[int, str]:
        """Return the numbers of the files whose names lead to them no more, with how, and where their bytes still are.

        A file that no name leads to is gone when the store closes; then no store opens the records that lie there.
        """
        found: dict[int, str] = {}
        for number, index in self.indices.items():
            assert self._device is not None
            what = self._device.external.lost(index)
            if what is not None:
                still = f"/proc/{os.getpid()}/fd/{self._device.descriptor(index)}"
                found[number] = f"{self._paths[index]}: {what}; its bytes are still in {still}"
        return found

    def close(self) -> None:
        """Close the files. Idempotent."""
        if self._device is not None:
            self._device.close()

    def __repr__(self) -> str:
        return f"<ExternalSources {len(self._paths)} files>"


def _files_of(given: str | os.PathLike[str]) -> list[str]:
    """Return the file, or the safetensors files of the folder, in order."""
    path = os.path.expanduser(os.fspath(given))
    if not os.path.isdir(path):
        return [os.path.abspath(path)]
    found = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not found:
        raise UsageError(f"external: {path} is a folder without a *.safetensors file")
    return [os.path.abspath(os.path.join(path, name)) for name in found]
