"""System calls of a store in a process of its own, as strace sees them: their order, and a kill at one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.available import SEARCH_PATH

__all__ = ["Call", "kill_at", "trace"]

_ROOT = Path(__file__).parents[2]
_CALLS = "pwrite64,pwritev,pwritev2,fdatasync,fsync,ftruncate,openat"
_NAMES = {"pwrite64": "write", "pwritev": "write", "pwritev2": "write", "fdatasync": "sync", "fsync": "sync"}
_LINE = re.compile(r"(?P<pid>\d+) +(?:<\.\.\. )?(?P<name>\w+)(?P<rest>.*)")
_FILE = re.compile(r"\(\d+<(?P<file>[^>]*)>")
_PLACE = re.compile(r"(?:iov_len=|, )(?P<nbytes>\d+)(?:\}\], 1)?, (?P<offset>\d+)(?:, 0)?(?:\)| <unfinished)")
_CREATED = re.compile(r"O_CREAT.*<(?P<file>[^>]*)>$")


@dataclass(frozen=True, slots=True)
class Call:
    """A write as it begins, or a "sync", "truncate" or "create" as it ends; of ``file``, [``start``, ``end``)."""

    name: str
    file: str
    start: int = 0
    end: int = 0


def trace(code: str, arguments: Sequence[str], log: Path) -> tuple[str, list[Call]]:
    """Run Python ``code`` and return what it printed and its calls, in their order."""
    command = ["strace", "-f", "-qq", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={_CALLS}", "-o", str(log)]
    done = _python(command, code, arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, list(_calls(log.read_text().splitlines()))


def kill_at(code: str, arguments: Sequence[str], *, file: Path, call: str, number: int) -> None:
    """Run Python ``code`` and kill it as it begins the ``number``-th ``call`` of one of its threads to ``file``."""
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-P", str(file), "-e", f"trace={call}"]
    done = _python([*command, "-e", f"inject={call}:signal=SIGKILL:when={number}"], code, arguments)
    assert done.returncode, "it ended before it was killed"


def _python(command: Sequence[str], code: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": SEARCH_PATH}
    return subprocess.run(
        [*command, sys.executable, "-c", code, *arguments],
        cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def _calls(lines: Sequence[str]) -> Iterator[Call]:
    unfinished: dict[str, Call] = {}  # by thread: what ends later
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, rest = _NAMES.get(match["name"], match["name"]), match["rest"]
        if "resumed>" in rest:
            call = unfinished.pop(match["pid"], None)
            if call is not None and rest.endswith("= 0"):
                yield call
            continue
        file = _FILE.match(rest)
        if name == "openat":
            created = _CREATED.search(rest)
            if created is not None:
                yield Call("create", created["file"])
        elif name == "write":
            place = _PLACE.search(rest)
            if file is not None and place is not None:
                start = int(place["offset"])
                yield Call("write", file["file"], start, start + int(place["nbytes"]))
        elif file is not None:
            call = Call("truncate" if name == "ftruncate" else name, file["file"])
            if rest.endswith("<unfinished ...>"):
                unfinished[match["pid"]] = call
            elif rest.endswith("= 0"):
                yield call
