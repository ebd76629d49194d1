"""Serves one of the FUSE file systems: `python -m tests.rigs.daemon KIND BACKING MOUNT NAME`.

Each line of JSON on stdin is a command, ["method", {arguments}], answered by one line of JSON; the first line is
"ready". It ends when its file system is unmounted: whoever started it may be gone by then.
"""

from __future__ import annotations

import json
import sys
import threading

from bench.faulty_files import FaultyFiles
from tests.rigs.fuse import mount, serve
from tests.rigs.passthrough import Passthrough
from tests.rigs.recorded_files import RecordedFiles
from tests.rigs.volatile_disks import VolatileDisks

KINDS: dict[str, type[Passthrough]] = {"faulty": FaultyFiles, "volatile": VolatileDisks, "recorded": RecordedFiles}


def main() -> None:
    """Mount, serve, and obey."""
    kind, backing, directory, name = sys.argv[1:]
    files = KINDS[kind](backing)
    fd = mount(directory, name)
    server = threading.Thread(target=serve, args=(fd, files))
    server.start()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(files, method)(**arguments)), flush=True)
    server.join()


if __name__ == "__main__":
    main()
