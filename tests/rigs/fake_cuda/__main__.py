"""The third tier on torch's own CUDA build, over a CUDA runtime whose device memory is host memory; no GPU is needed.

`.venv/bin/python -m tests.rigs.fake_cuda DIR [PART...] [-- PYTEST'S OPTIONS]` builds the rig in DIR (1.1 GB, of which
pip downloads half, in a minute or three; later calls build what has changed) and runs the parts, by default all: the
accelerator tests, the rig's own checks, the mutants of the device tier (ten minutes). By hand alone.
Real are torch's Python and C++: allocator, guards, streams, events, copies, generators, autograd's threads, autocast.
A copy runs when somebody waits for it and not before, so a missing wait gives wrong values. Not real are time, the bits
of CUDA's kernels (each operator runs the CPU's, at once), cuBLAS, cuDNN, CUPTI and graphs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.rigs.available import off
from tests.rigs.fake_cuda.build import ROOT, BuildError, build, environment, refusal

__all__ = ["main"]

PYTEST = ["-m", "pytest", "-c", "scripts/gpu_check.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-q"]
PYTEST += ["-p", "tests.rigs.fake_cuda.plugin"]
PARTS = {
    "accelerator": [*PYTEST, "tests/accelerator"],  # the same files as on a real card
    "checks": [*PYTEST, "tests/rigs/fake_cuda/checks.py"],
    "mutants": ["-m", "tests.rigs.fake_cuda.missing_waits"],
}


def main(arguments: Sequence[str]) -> int:
    """Build the rig and run its parts; return the status of the first that failed, 2 where nothing can be built."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.fake_cuda", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="of the build")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}; by default all")
    given = parser.parse_args(arguments[:end])
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: the parts are {', '.join(PARTS)}")
    directory, reason, status = given.directory.resolve(), refusal(), 0
    if reason is None:
        try:
            build(directory)
        except BuildError as error:
            reason = str(error)
    if reason is not None:
        print(off("fake CUDA", reason))
        return 2
    for part in given.parts or PARTS:
        print(f"fake CUDA: {part}", flush=True)
        command = [sys.executable, *PARTS[part], *arguments[end + 1 :]]
        ended = subprocess.run(command, cwd=ROOT, env=environment(directory)).returncode
        status = status or ended
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
