"""ExternalSources: the user's own files that records may lie in, named by the caller each time the store is opened.

The catalog knows them by length and header, not by their path: so a folder may move, and no path is ever taken from
data. Neither tells a model from its fine-tune: the digests of the blocks do, which the first commit has all of. See
external_match.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tiered.bytes.device.base import Device
from tiered.bytes.device.engines import open_external
from tiered.bytes.device.external_files import refuse_one_path
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import UsageError
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.root import ExternalFile, Root
from tiered.store.format.safetensors_header import HeaderEntry, SafetensorsHeader, read_header
from tiered.store.lifetime.external_match import SlabReads, find_files
from tiered.units import format_bytes

__all__ = ["ExternalSources"]


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
        needed = {each.file for row in rows.external() for each in row.ranges} if root.external else set()
        self.files = root.external[: max(needed, default=-1) + 1]
        self._free = [number for number in range(len(self.files)) if number not in needed]
        if needed and self._device is not None:
            reads = SlabReads(self._device, root.store_uuid)
            files = {number: self.files[number] for number in sorted(needed)}
            self.indices.update(find_files(files, self._identities, rows.external(), reads))
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
        device = self._device
        if device is None:
            return found
        for number, index in self.indices.items():
            what = device.external.lost(index)
            if what is not None:
                still = f"/proc/{os.getpid()}/fd/{device.descriptor(index)}"
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
