"""A Python that has imported torch already: programs that tests start are forked from it, which saves each the import.

For tests that are not about the start of a process. Nothing is executed: the limits, groups and name spaces of whoever
starts a program are not the program's, and OpenMP does not read its environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.nursery import warm_up

__all__ = ["WarmPython"]

_ROOT = Path(__file__).parents[2]
_MOST_NBYTES = 1 << 17  # of a request: a command line and an environment

_FOR_CHILDREN = "TIERED_TESTS_PYTHON"

_COMMAND = """#!{python} -IS
import contextlib, json, os, signal, socket, sys
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect("/proc/self/fd/%d/socket" % os.open({directory!r}, os.O_PATH))
request = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "environ": dict(os.environ)}}
handed_on = signal.SIGINT, signal.SIGTERM
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # order: until it is known to whom
socket.send_fds(end, [json.dumps(request).encode()], [0, 1, 2])
def heard():
    return int(end.recv(16) or sys.exit("the warm Python has died"))
def hand_on(number, frame):
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, number)
program = heard()
for number in handed_on:
    signal.signal(number, hand_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
status = heard()
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class WarmPython:
    """A process that has imported torch and run nothing, and a command in ``directory`` that forks from it.

    ``executable`` takes the command lines of a Python: a script, ``-m module`` or ``-c code``. The program gets the
    command's environment, directory and standard streams, and a process group of its own; its exit status is the
    command's. SIGINT and SIGTERM are handed on to it, and it is killed when the command is. With ``environment`` it,
    or a Python started as any, starts its own programs (those that it starts by ``sys.executable``) in the same way.
    """

    def __init__(self, directory: Path, *, modules: tuple[str, ...] = ()) -> None:
        """``modules`` are imported, too."""
        self.executable = str(directory / "python")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            there = os.open(directory, os.O_PATH)
            listener.bind(f"/proc/self/fd/{there}/socket")  # the directory's own name may exceed a socket's 107 bytes
            os.close(there)
            listener.listen()
            command = [sys.executable, "-m", "tests.rigs.warm_python", str(listener.fileno()), *modules]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, cwd=_ROOT, pass_fds=[listener.fileno()], start_new_session=True,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        text = _COMMAND.format(python=sys.executable, directory=str(directory))
        Path(self.executable).write_text(text)
        Path(self.executable).chmod(0o700)
        (directory / "sitecustomize.py").write_text(f"import sys\nsys.executable = {self.executable!r}\n")
        self.environment = os.environ | {"PYTHONPATH": str(directory), _FOR_CHILDREN: self.executable}

    def close(self) -> None:
        """End it, and all that is left of what was forked from it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


# -- in that process -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Program:
    """A forked program, and the connection of the command that waits for it."""

    pid: int
    pidfd: int
    connection: socket.socket


def _serve(listener: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    programs: set[_Program] = set()
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                request, streams, _, _ = socket.recv_fds(connection, _MOST_NBYTES, 3)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    listener.close()
                    for program in programs:
                        program.connection.close()
                        os.close(program.pidfd)
                    connection.close()
                    _become(json.loads(request), streams)
                for stream in streams:
                    os.close(stream)
                program = _Program(pid, os.pidfd_open(pid), connection)
                _say(connection, pid)
                programs.add(program)
                selector.register(program.pidfd, selectors.EVENT_READ, program)
                selector.register(program.connection, selectors.EVENT_READ, program)
            elif key.fileobj == 0:  # whoever tests has closed it, or has died
                for program in programs:
                    _kill(program)
                return
            elif key.data not in programs:
                pass  # it ended in this very round
            elif key.fileobj is key.data.connection:  # nobody waits for it any longer
                selector.unregister(key.data.connection)
                _kill(key.data)
            else:
                programs.remove(key.data)
                _end(key.data, selector)


def _end(program: _Program, selector: selectors.BaseSelector) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1])
    _say(program.connection, status)
    selector.unregister(program.pidfd)
    with contextlib.suppress(KeyError):
        selector.unregister(program.connection)
    os.close(program.pidfd)
    program.connection.close()


def _say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # the command was killed, maybe with a word unread
        connection.send(str(number).encode())


def _kill(program: _Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(program.pidfd, signal.SIGKILL)


def _become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the program of ``request`` in this process, which is a fork, and end as Python would."""
    os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.executable = os.environ.get(_FOR_CHILDREN, sys.executable)
    sys.exit(_run(*request["argv"]))


def _run(first: str, *rest: str) -> None:
    import runpy

    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main  # lifetime: its names are there until after atexit
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv, sys.path[0] = list(rest), os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
