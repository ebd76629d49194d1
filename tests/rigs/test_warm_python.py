"""A program that is forked is the command that stands for it: what goes in, what comes out, and how it ends."""

import os
import signal
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


def test_a_command_that_is_killed_takes_its_program_along(warm_python: WarmPython) -> None:
    code = "import time; print('here', flush=True); time.sleep(1000)"
    with subprocess.Popen([warm_python.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        assert process.stdout.read() == "", "the end comes once the program is gone"


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


@pytest.mark.parametrize("is_forked", [True, False])
def test_with_its_environment_programs_of_a_program_are_forked(is_forked: bool, warm_python: WarmPython) -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(\"torch\" in sys.modules)'])"
    )
    python = warm_python.executable if is_forked else sys.executable
    for environment, answer in ((warm_python.environment, "True\n"), (dict(os.environ), "False\n")):
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
        assert done.stdout == answer, done.stderr
