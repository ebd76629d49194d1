"""Places that only root can make: mounts of one's own. They are gone after the test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return ``mount(*arguments)``: call mount(8) on a new directory and return that."""
    mounted: list[Path] = []

    def mount_on_new_directory(*arguments: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        command = ["mount", *arguments, str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")
        mounted.append(place)
        return place

    try:
        yield mount_on_new_directory
    finally:
        for place in reversed(mounted):
            # Lazy: the kernel lets go of the files of a closed ring a little later.
            subprocess.run(["umount", "--lazy", str(place)], check=True)
