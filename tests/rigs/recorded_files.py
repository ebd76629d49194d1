"""A FUSE file system that notes every change of its files, and what a crash at any of them can leave.

``RecordedFiles`` is mounted. Its changes, applied to the ``Image`` of its directory from before, make the directory of
any instant: as a kill leaves it, or as a power cut does, which of what no flush has covered loses all or any part.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import random
import signal
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.rigs.passthrough import Passthrough

__all__ = ["Change", "Image", "Loss", "RecordedFiles", "read_changes"]

Loss = Literal["drop", "subset", "torn"]

_SIZE = 8  # what setattr is to change
_INODE_OFFSET = 40  # in the reply to whoever makes a file
_SECTOR_NBYTES = 512
_FIRST_NEW = 1 << 60  # the numbers that files get here: those of the drive are used again


class Change(NamedTuple):
    """A change of the file or directory ``inode``; ``place`` is the directory that it lies in, or is.

    "make" and "make directory": ``other`` is called ``name`` in it; "rename": ``name`` in it is called ``new_name``;
    "remove": ``name`` is gone; "write": ``data`` at ``offset``; "resize": to ``offset`` bytes, "grow": to at least so
    many; "flush": of a file, or of the names in a directory.
    """

    kind: str
    inode: int
    place: str
    name: str = ""
    other: int = 0
    offset: int = 0
    data: bytes = b""
    new_name: str = ""


def read_changes(path: Path) -> list[Change]:
    """Return what ``RecordedFiles.end`` wrote."""
    return [Change(*each) for each in pickle.loads(path.read_bytes())]


class RecordedFiles(Passthrough):
    """The directory ``backing``. Between ``begin`` and ``end`` each change is noted, one after the other."""

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self._order = threading.Lock()  # changes are carried out under it, in the order in which they are noted
        self._changes: list[Change] = []
        self._numbers_here: dict[int, int] = {}  # of files made since ``begin``, by inode
        self._places: dict[int, str] = {}
        self._is_recording = False
        self._kill_at = -1
        self._victims: dict[str, int] = {}

    # Below: commands

    def begin(self, kill_at: int = -1, victims: dict[str, int] | None = None) -> None:
        """Note changes from now on.

        ``victims`` are pids by directory: a process is killed in place of the change number ``kill_at`` in its own.
        """
        with self._order:
            self._changes, self._numbers_here, self._places = [], {}, {}
            self._kill_at, self._victims, self._is_recording = kill_at, victims or {}, True
            for path, _, names in os.walk(self.backing):
                place = os.path.relpath(path, self.backing)
                inodes = [os.lstat(path), *(os.lstat(os.path.join(path, name)) for name in names)]
                self._places |= dict.fromkeys((each.st_ino for each in inodes), place)

    def end(self, path: str) -> int:
        """Write the changes to the file ``path``; return how many there were."""
        with self._order:
            self._is_recording = False
            Path(path).write_bytes(pickle.dumps([tuple(each) for each in self._changes]))
            return len(self._changes)

    # Below: changes

    def mkdir(self, node: int, body: memoryview) -> bytes:
        make = lambda: Passthrough.mkdir(self, node, body)  # noqa: E731
        return self._noted(make, "make directory", self._inode(node), name=_text_at(body, 8))

    def create(self, node: int, body: memoryview) -> bytes:
        make = lambda: Passthrough.create(self, node, body)  # noqa: E731
        return self._noted(make, "make", self._inode(node), name=_text_at(body, 16))

    def unlink(self, node: int, body: memoryview) -> bytes:
        remove = lambda: Passthrough.unlink(self, node, body)  # noqa: E731
        return self._noted(remove, "remove", self._inode(node), name=_text_at(body, 0))

    def rmdir(self, node: int, body: memoryview) -> bytes:
        remove = lambda: Passthrough.rmdir(self, node, body)  # noqa: E731
        return self._noted(remove, "remove", self._inode(node), name=_text_at(body, 0))

    def rename(self, node: int, body: memoryview, head: int = 8) -> bytes:
        rename = lambda: Passthrough.rename(self, node, body, head)  # noqa: E731
        name = _text_at(body, head)
        new_name = _text_at(body, head + len(os.fsencode(name)) + 1)
        return self._noted(rename, "rename", self._inode(node), name=name, new_name=new_name)

    def setattr(self, node: int, body: memoryview) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        change = lambda: Passthrough.setattr(self, node, body)  # noqa: E731
        return self._noted(change, "resize", self._inode(node), offset=size) if valid & _SIZE else change()

    def fallocate(self, node: int, body: memoryview) -> bytes:
        _, offset, nbytes, _ = struct.unpack_from("=QQQI", body)
        grow = lambda: Passthrough.fallocate(self, node, body)  # noqa: E731
        return self._noted(grow, "grow", self._inode(node), offset=offset + nbytes)

    def pwrite(self, fd: int, data: memoryview, offset: int, name: str) -> int:
        written = bytes(data)
        write = lambda: os.pwrite(fd, written, offset)  # noqa: E731
        return self._noted(write, "write", self._number(os.fstat(fd).st_ino), offset=offset, data=written)

    def flush(self, fd: int, name: str) -> None:
        self._noted(lambda: b"", "flush", self._number(os.fstat(fd).st_ino))

    def fsyncdir(self, node: int, body: memoryview) -> bytes:
        return self._noted(lambda: b"", "flush", self._inode(node))

    def _noted(self, act: Callable[[], Any], kind: str, inode: int, **what: Any) -> Any:
        with self._order:
            if not self._is_recording:
                return act()
            change = Change(kind, inode, self._places[inode], **what)
            if change.place in self._victims:
                self._kill_at -= 1
                if self._kill_at < 0:
                    os.kill(self._victims.pop(change.place), signal.SIGKILL)
                    self._victims.clear()
                    raise OSError("its process was killed")
            reply = act()
            if change.kind.startswith("make"):
                (found,) = struct.unpack_from("=Q", reply, _INODE_OFFSET)
                number = self._numbers_here[found] = _FIRST_NEW + len(self._changes)
                is_file = change.kind == "make"
                self._places[number] = os.path.normpath(os.path.join(change.place, "" if is_file else change.name))
                change = change._replace(other=number)
            self._changes.append(change)
            return reply

    def _inode(self, node: int) -> int:
        return self._number(self._nodes[node].key[1])

    def _number(self, inode: int) -> int:
        return self._numbers_here.get(inode, inode)


def _text_at(body: memoryview, offset: int) -> str:
    return os.fsdecode(bytes(body[offset:]).split(b"\0", 1)[0])


class Image:
    """What lies in a directory: files, and names in directories, by their numbers."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.names: dict[int, dict[str, int]] = defaultdict(dict)
        self.data: dict[int, bytearray] = defaultdict(bytearray)  # without the zeros at the end
        self.sizes: dict[int, int] = defaultdict(int)
        self.names[root] = {}

    @classmethod
    def of(cls, directory: Path) -> Image:
        """Read ``directory``."""
        image = cls(os.lstat(directory).st_ino)
        for path, directories, names in os.walk(directory):
            inodes = {name: os.lstat(os.path.join(path, name)).st_ino for name in (*directories, *names)}
            image.names[os.lstat(path).st_ino] = inodes
            for name in names:
                data = Path(path, name).read_bytes()
                image.sizes[inodes[name]], image.data[inodes[name]] = len(data), bytearray(data.rstrip(b"\0"))
        return image

    def killed(self, changes: Sequence[Change]) -> Image:
        """Return what there is after ``changes``."""
        image = copy.deepcopy(self)
        for change in changes:
            image._apply(change)
        return image

    def power_cut(self, changes: Sequence[Change], loss: Loss, rng: random.Random) -> Image:
        """Return what there may be after ``changes`` and a power cut.

        Of changes that no flush has covered are there with "drop" none; with "subset" any of a file's, and of a
        directory's the first ones; with "torn" any sectors of a write. A flush of a file says nothing of its name.
        """
        image = copy.deepcopy(self)
        pending: dict[int, list[Change]] = defaultdict(list)
        for change in changes:
            pending[change.inode].append(change)
            if change.kind == "flush":
                for each in pending.pop(change.inode):
                    image._apply(each)
        if loss != "drop":
            for left in pending.values():
                for change in _survivors(left, loss, rng):
                    image._apply(change)
        return image

    def _apply(self, change: Change) -> None:
        names, inode = self.names, change.inode
        if change.kind == "make":
            names[inode][change.name] = change.other
            self.sizes[change.other] += 0
        elif change.kind == "make directory":
            names[inode][change.name] = change.other
            names[change.other].update()
        elif change.kind == "remove":
            del names[inode][change.name]
        elif change.kind == "rename":
            names[inode][change.new_name] = names[inode].pop(change.name)
        elif change.kind == "write":
            data, end = self.data[inode], change.offset + len(change.data)
            data.extend(bytes(max(0, end - len(data))))
            data[change.offset : end] = change.data
            self.sizes[inode] = max(self.sizes[inode], end)
        elif change.kind == "resize":
            del self.data[inode][change.offset :]
            self.sizes[inode] = change.offset
        elif change.kind == "grow":
            self.sizes[inode] = max(self.sizes[inode], change.offset)

    def write(self, directory: Path) -> None:
        """Make ``directory``, which is new, hold it."""
        directory.mkdir(mode=0o700)
        for path, number in self._paths(self.root, ""):
            if number in self.names:
                (directory / path).mkdir(mode=0o700)
                continue
            fd = os.open(directory / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.truncate(fd, self.sizes[number])
            os.pwrite(fd, self.data[number], 0)
            os.close(fd)

    def digest(self) -> bytes:
        """Return what tells it from another one."""
        found = hashlib.blake2b()
        for path, number in self._paths(self.root, ""):
            data = b"" if number in self.names else bytes(self.data[number].rstrip(b"\0"))
            found.update(f"{path} {number in self.names} {self.sizes.get(number)} {len(data)} ".encode() + data)
        return found.digest()

    def _paths(self, directory: int, path: str) -> Iterator[tuple[str, int]]:
        for name, number in sorted(self.names[directory].items()):
            yield os.path.join(path, name), number
            if number in self.names:
                yield from self._paths(number, os.path.join(path, name))


def _survivors(changes: Sequence[Change], loss: Loss, rng: random.Random) -> Iterator[Change]:
    """Yield what a power cut leaves of changes of one file, or of the names in one directory."""
    is_of_names = changes[0].kind in ("make", "make directory", "remove", "rename")
    if is_of_names:
        yield from changes[: rng.randint(0, len(changes))]
        return
    for change in changes:
        if rng.random() < 0.5:
            continue
        if loss == "torn" and change.kind == "write":
            for start in range(0, len(change.data), _SECTOR_NBYTES):
                if rng.random() < 0.5:
                    data = change.data[start : start + _SECTOR_NBYTES]
                    yield change._replace(offset=change.offset + start, data=data)
        else:
            yield change
