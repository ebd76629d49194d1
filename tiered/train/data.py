"""Text files as one long stream of bytes, and batches drawn from it.

The bytes of a batch depend on the files, the seed and the batch's number alone: never on earlier batches, nor
on memory. No file is kept open or in memory.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from tiered.errors import UsageError
from tiered.units import KiB

__all__ = ["Corpus", "Loader"]

_SNIFF_NBYTES = 4096
_SAMPLE_NBYTES = 256 * KiB
_NUM_SAMPLES = 256
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """The bytes of ``files`` one after the other, read on demand.

    The files must not change while it is used: sizes are taken once, and a file that has become shorter raises
    UsageError when it is read.
    """

    def __init__(self, files: Iterable[Path], *, name: str) -> None:
        self.name = name
        self._files = tuple(files)
        sizes = [_size(file) for file in self._files]
        self._ends = tuple(accumulate(sizes))
        self.nbytes = self._ends[-1] if self._ends else 0

    @classmethod
    def of_paths(cls, paths: Sequence[str | Path]) -> Corpus:
        """Return the corpus of the given text files and of all text files under the given directories.

        Hidden files, links and files with a zero byte near their start are left out of directories; a file named
        itself is taken as it is. The order is that of the names. Raises UsageError for a path that is not there.
        """
        files: list[Path] = []
        for path in map(Path, paths):
            if not path.exists():
                raise UsageError(f"no data at {path}: the path does not exist; name a text file or a directory of them")
            files += [path] if path.is_file() else filter(_is_text, _walk(path, suffix=""))
        return cls(files, name=", ".join(map(str, paths)))

    @classmethod
    def of_standard_library(cls) -> Corpus:
        """Return the corpus of the source of the Python that runs: about 30 MB of text, found on every machine."""
        root = Path(sysconfig.get_paths()["stdlib"])
        return cls(_walk(root, suffix=".py"), name=f"the source of Python's standard library, {root}")

    @property
    def num_files(self) -> int:
        """The number of files."""
        return len(self._files)

    @property
    def outline(self) -> str:
        """A digest of the names' last parts and the sizes of all files, by which runs of format 1 know their data."""
        return self._outline().hexdigest()[:16]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, sizes and content: another one means another corpus; blocks while it reads, once.

        It sees every byte of a corpus of up to 64 MiB; of a larger one 256 blocks of 256 KiB, the first and the last
        among them: a change between them that leaves all sizes as they are is not seen.
        """
        digest = self._outline()
        for offset in _sampled(self.nbytes):
            digest.update(self.read(offset, min(_SAMPLE_NBYTES, self.nbytes - offset)))
        return f"2-{digest.hexdigest()[:16]}"

    def _outline(self) -> hashlib._Hash:
        digest = hashlib.sha256()
        for file, end in zip(self._files, self._ends, strict=True):
            digest.update(f"{end} {file.name}\n".encode("utf-8", "surrogateescape"))
        return digest

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes at ``offset`` of the stream; blocks on the files' device."""
        parts = []
        number = bisect_right(self._ends, offset)
        while nbytes:
            start = self._ends[number - 1] if number else 0
            part = _read(self._files[number], offset - start, min(nbytes, self._ends[number] - offset))
            parts.append(part)
            offset, nbytes, number = offset + len(part), nbytes - len(part), number + 1
        return b"".join(parts)

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {self.num_files} files, {self.nbytes} B)"


def _sampled(nbytes: int) -> Sequence[int]:
    """Return where the blocks of a stream of ``nbytes`` begin by which it is known: all, or as many evenly spread."""
    if nbytes <= _NUM_SAMPLES * _SAMPLE_NBYTES:
        return range(0, nbytes, _SAMPLE_NBYTES)
    return [number * (nbytes - _SAMPLE_NBYTES) // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot use {file} as data: {error.strerror}") from error


def _read(file: Path, offset: int, nbytes: int) -> bytes:
    try:
        with open(file, "rb", buffering=0) as stream:
            part = os.pread(stream.fileno(), nbytes, offset)
    except OSError as error:
        raise UsageError(f"cannot read the data file {file}: {error.strerror}") from error
    if len(part) != nbytes:
        raise UsageError(
            f"the data file {file} has changed while in use: expected {nbytes} bytes at {offset}, got {len(part)}; "
            "give the run data that stays as it is"
        )
    return part


def _walk(root: Path, *, suffix: str) -> Iterator[Path]:
    """Yield the regular, visible files under ``root`` by name, links and other people's packages left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_OURS)
        for name in sorted(names):
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


def _is_text(file: Path) -> bool:
    try:
        with open(file, "rb", buffering=0) as stream:
            return b"\0" not in stream.read(_SNIFF_NBYTES)
    except OSError as error:
        raise UsageError(f"cannot read the data file {file}: {error.strerror}") from error


class Loader:
    """An endless iterator of (tokens, targets), each int64 of shape (batch, context); one thread at a time.

    Its state is the number of the next batch: register it with a store, and a resumed run draws what the undisturbed
    one would have drawn. ``load_state_dict`` refuses the state of a loader over other data or of another seed or size;
    a state of format 1 knows its data by names and sizes alone.
    """

    def __init__(self, corpus: Corpus, *, batch: int, context: int, seed: int) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if corpus.nbytes <= context:
            raise UsageError(
                f"too little data: {corpus.name} has {corpus.num_files} text files with {corpus.nbytes} bytes, "
                f"a context of {context} needs at least {context + 1}"
            )
        self.corpus = corpus
        self.batch = batch
        self.context = context
        self.seed = seed
        self.position = 0
        self._fingerprint = corpus.fingerprint  # order: now, not in the first commit

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        windows = b"".join(self.corpus.read(self._offset(row), self.context + 1) for row in range(self.batch))
        self.position += 1
        window = torch.frombuffer(bytearray(windows), dtype=torch.uint8).view(self.batch, self.context + 1).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _offset(self, row: int) -> int:
        """Return where the next batch's ``row`` starts. A digest, not a generator: the same in every version of all."""
        digest = hashlib.blake2b(f"{self.seed} {self.position} {row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (self.corpus.nbytes - self.context)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position, and the identity of the data it is in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go to the state's position. Raises UsageError, and stays where it is, when the state is another loader's."""
        is_format_1 = state.get("fingerprint") == self.corpus.outline
        identity = self._identity() | ({"fingerprint": self.corpus.outline} if is_format_1 else {})
        differing = [
            f"{name}: was {state.get(name)!r}, is {value!r}"
            for name, value in identity.items()
            if state.get(name) != value
        ]
        if differing:
            raise UsageError(
                f"the run was trained on other data ({'; '.join(differing)}); name the same data with --data"
            )
        self.position = int(state["position"])

    def _identity(self) -> dict[str, int | str]:
        return {
            "seed": self.seed,
            "batch": self.batch,
            "context": self.context,
            "num_files": self.corpus.num_files,
            "nbytes": self.corpus.nbytes,
            "fingerprint": self._fingerprint,
        }

    def __repr__(self) -> str:
        return f"Loader({self.corpus!r}, batch={self.batch}, context={self.context}, position={self.position})"
