"""A program that is forked is the command that stands for it: what goes in, what comes out, and how it ends."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.warm_python import WarmPython

WHAT_IT_HAS = """
import os, sys
print(os.getcwd(), os.environ["WORD"], sys.argv, sys.stdin.read(), "torch" in sys.modules, os.getpgid(0) == os.getpid())
print("descriptors", *sorted(os.listdir("/proc/self/fd")), "threads", len(os.listdir("/proc/self/task")))
print("said aside", file=sys.stderr)
"""


def run(python: WarmPython, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python.executable, *arguments], capture_output=True, text=True, timeout=300, **options)


def test_a_program_has_what_the_command_was_given(warm_python: WarmPython, tmp_path: Path) -> None:
    environment = os.environ | {"WORD": "unit"}
    done = run(warm_python, "-c", WHAT_IT_HAS, "a", "b c", cwd=tmp_path, env=environment, input="typed")
    first, second = done.stdout.splitlines()
    assert first == f"{tmp_path} unit ['-c', 'a', 'b c'] typed True True"
    assert second == "descriptors 0 1 2 3 threads 1", "but for what lists them, no descriptor of another program"
    assert (done.returncode, done.stderr) == (0, "said aside\n")


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no drive')", 1, "no drive\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(130)", 130, ""),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_the_end_of_a_program_is_that_of_the_command(
    code: str, status: int, says: str, warm_python: WarmPython
) -> None:
    done = run(warm_python, "-c", code)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(says)


def test_scripts_and_modules_are_run_as_by_python(warm_python: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'extent'\n")
    (tmp_path / "script.py").write_text("import beside, sys; print(__name__, beside.WORD, sys.argv)\n")
    for command in ([f"{tmp_path}/script.py", "x"], ["-m", "script", "x"]):
        warm, cold = run(warm_python, *command, cwd=tmp_path), subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
        )  # fmt: skip
        assert warm.stdout == cold.stdout == f"__main__ extent ['{tmp_path}/script.py', 'x']\n", warm.stderr


def test_a_command_that_is_killed_takes_its_program_along(warm_python: WarmPython) -> None:
    code = "import time; print('here', flush=True); time.sleep(1000)"
    with subprocess.Popen([warm_python.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        assert process.stdout.read() == "", "the end comes once the program is gone"


def test_a_command_that_is_killed_before_it_has_heard_of_its_program_ends_nobody_else(warm_python: WarmPython) -> None:
    request = {"argv": ["-c", "import time; time.sleep(1000)"], "cwd": os.getcwd(), "environ": dict(os.environ)}
    there = os.open(Path(warm_python.executable).parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as command:
        command.connect(f"/proc/self/fd/{there}/socket")
        os.close(there)
        socket.send_fds(command, [json.dumps(request).encode()], [0, 1, 2])
        poll = select.poll()
        poll.register(command, select.POLLIN)
        assert poll.poll(300_000), "it was told of no program"
    assert run(warm_python, "-c", "print('here')").stdout == "here\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_reaches_its_program(number: signal.Signals, warm_python: WarmPython) -> None:
    code = (
        "import signal, sys, time\n"
        f"signal.signal({number:d}, lambda number, frame: sys.exit(number + 40))\n"
        "print('here', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([warm_python.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait(timeout=300) == number + 40


def test_the_names_of_a_program_are_there_until_its_last_function(warm_python: WarmPython) -> None:
    code = (
        "import atexit, weakref\n"
        "class Item: pass\n"
        "item = Item()\n"
        "weakref.finalize(item, print, 'the item').atexit = False\n"
        "atexit.register(print, 'the last function')\n"
    )
    for python in (warm_python.executable, sys.executable):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.stdout.startswith("the last function\n") and not done.stderr


@pytest.mark.parametrize("is_forked", [True, False])
def test_with_its_environment_programs_of_a_program_are_forked(is_forked: bool, warm_python: WarmPython) -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"
    )
    python = warm_python.executable if is_forked else sys.executable
    for environment, answer in ((warm_python.environment, "True\n"), (dict(os.environ), "False\n")):
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
        assert done.stdout == answer, done.stderr
