"""Cleans a rig's room when its input ends: `python -m tests.rigs.keeper DIRECTORY`."""

import sys
from pathlib import Path

from tests.rigs.room import clean

if __name__ == "__main__":
    sys.stdin.read()
    clean(Path(sys.argv[1]))
