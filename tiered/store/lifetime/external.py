"""ExternalSources: the user's own files that records may lie in, named by the caller each time the store is opened.

The catalog knows them by length and header, not by their path: so a folder may move, and no path is ever taken from
data. Neither tells a model from its fine-tune: the digests of the blocks do, which the first commit has all of.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tiered.bytes.device.base import Device
from tiered.bytes.device.engines import open_external
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import UsageError
from tiered.store.format.checksum import digest
from tiered.store.format.root import ExternalFile
from tiered.store.format.safetensors_header import HeaderEntry, SafetensorsHeader, read_header
from tiered.units import format_bytes

__all__ = ["ExternalSources"]


class ExternalSources:
    """Safetensors files that are open to be read in place. ``device`` numbers them as the catalog does.

    Files that the catalog knows come first, in its order; the others follow as they were given.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], engine: str) -> None:
        """Open ``paths``, files or folders of them; blocks for one read of each. Raises UsageError, DeviceError."""
        self._paths = [str(path) for given in paths for path in _files_of(given)]
        self._engine = engine
        self._headers = [read_header(path) for path in self._paths]
        self.files: tuple[ExternalFile, ...] = tuple(map(_identity, self._headers))
        self._device: FileDevice | None = None

    def match(self, known: Sequence[ExternalFile]) -> None:
        """Number the files as ``known`` does. Raises UsageError for one that is missing, or is not what it was."""
        order = [self._find(file, number) for number, file in enumerate(known)]
        order += [index for index in range(len(self.files)) if index not in order]
        self._paths = [self._paths[index] for index in order]
        self._headers = [self._headers[index] for index in order]
        self.files = (*known, *(self.files[index] for index in order[len(known) :]))
        if self._paths:
            self._device = open_external(self._paths, "auto" if self._engine == "memory" else self._engine)

    def _find(self, file: ExternalFile, number: int) -> int:
        """Return the index of the given file that is ``file``."""
        same = [i for i, f in enumerate(self.files) if (f.nbytes, f.header_digest) == (file.nbytes, file.header_digest)]
        found = next((index for index in same if self.files[index].name == file.name), same[0] if same else None)
        if found is not None:
            return found
        namesakes = [i for i, f in enumerate(self.files) if f.name == file.name]
        if namesakes:
            got, path = self.files[namesakes[0]], self._paths[namesakes[0]]
            raise UsageError(
                f"{path} is another file than the store's records lie in: expected {file.nbytes:,} bytes"
                f"{'' if got.nbytes != file.nbytes else ' with another header'}, got {got.nbytes:,}; give the file that"
                " the store was made with"
            )
        given = f"given: {', '.join(self._paths)}" if self._paths else "none was given"
        raise UsageError(
            f"records of the store lie in the file {file.name!r} of {format_bytes(file.nbytes)}, which is missing; "
            f'{given}. Open the store with external=["/path/to/{file.name}"]'
        )

    @property
    def device(self) -> Device | None:
        """The device of all files; None where there are none."""
        return self._device

    @property
    def paths(self) -> list[str]:
        """The files' paths, by number."""
        return list(self._paths)

    def find(self, path: str | os.PathLike[str], name: str) -> tuple[int, HeaderEntry]:
        """Return the number of the file at ``path``, and its entry of ``name``. Raises UsageError."""
        real = os.path.realpath(path)
        for number, each in enumerate(self._paths):
            if os.path.realpath(each) == real:
                return number, self._headers[number].entry(name)
        raise UsageError(f"{path} is not among the files that the store was opened with: give it in external=[...]")

    def changed(self) -> str | None:
        """Return in what way a file has changed since it was opened, or None."""
        return None if self._device is None else self._device.external.changed()

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


def _identity(header: SafetensorsHeader) -> ExternalFile:
    """Return what the catalog knows a file by; blocks for a read of its header."""
    with open(header.path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        content = file.read(header.nbytes)
    return ExternalFile(os.path.basename(header.path), nbytes, digest(content, 0))


