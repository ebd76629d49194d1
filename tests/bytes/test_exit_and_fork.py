"""What is done at the end of the process and in forked children, and that what is gone leaves nothing behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from tests.interrupts import interrupt_at
from tiered.bytes import exit_and_fork


class Item:
    def __init__(self, name: str) -> None:
        self.name = name


def test_the_newest_comes_first_and_one_that_fails_stops_nobody() -> None:
    code = (
        "from tests.bytes.test_exit_and_fork import Item\n"
        "from tiered.bytes.exit_and_fork import at_exit\n"
        "import threading\n"
        "done = threading.Event()\n"
        "threading.Thread(target=done.wait).start()\n"  # joined only after ours: else this would hang
        "items = [Item('a'), Item('b'), Item('c'), Item('gone')]\n"
        "for item in items:\n"
        "    at_exit(item, lambda item: print(item.name, flush=True) or 1 / (item.name != 'b'))\n"
        "at_exit(items.pop(), lambda item: print('gone'))\n"
        "at_exit(items[0], lambda item: done.set())\n"
        "item = None\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["c", "b", "a"]
    assert "ZeroDivisionError" in found.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told() -> None:
    item = Item("a")
    told: list[str] = []
    exit_and_fork.after_fork(item, lambda item: told.append(item.name))
    pid = os.fork()
    if pid == 0:
        os._exit(7 if told == ["a"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not told


def test_a_child_that_is_forked_while_another_thread_registers_can_register_too() -> None:
    code = (
        "import os, signal, threading\n"
        "from tests.bytes.test_exit_and_fork import Item\n"
        "from tiered.bytes import exit_and_fork\n"
        "item, found, register = Item('a'), [], threading._register_atexit\n"
        "def fork():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        signal.alarm(10)\n"
        "        exit_and_fork.at_exit(item, print)\n"
        "        os._exit(7)\n"
        "    found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "def register_slowly(run):\n"
        "    register(run)\n"
        "    thread = threading.Thread(target=fork)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "threading._register_atexit = register_slowly\n"
        "exit_and_fork.at_exit(item, print)\n"
        "os._exit(found[0])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7


def test_what_is_gone_leaves_nothing() -> None:
    lists = (exit_and_fork._at_exit, exit_and_fork._after_fork)
    gc.collect()
    before = [len(actions._actions) for actions in lists]
    items = [Item(str(i)) for i in range(100)]
    for item in items:
        exit_and_fork.at_exit(item, print)
        exit_and_fork.after_fork(item, print)
    assert [len(actions._actions) for actions in lists] == [number + 100 for number in before]
    del items, item
    gc.collect()
    assert [len(actions._actions) for actions in lists] == before


def test_an_interrupt_while_an_item_dies_is_not_lost() -> None:
    """What is raised in the callback of a dying object is printed and raised nowhere."""

    def make_and_drop() -> None:
        item = Item("dies")
        exit_and_fork.after_fork(item, print)
        del item

    make_and_drop()  # order: the first one has the interpreter call the actions
    with interrupt_at() as places:
        make_and_drop()
    assert places.number >= 3
    for number in range(1, places.number + 1):
        with pytest.raises(KeyboardInterrupt), interrupt_at(number):
            make_and_drop()
