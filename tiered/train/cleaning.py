"""`tiered gc`: the leftovers of crashes in the directories of a run, listed, agreed to, and removed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tiered.console.page import say
from tiered.console.question import confirm
from tiered.console.report_file import check_writable, write_report
from tiered.errors import UsageError
from tiered.store.lifetime.leftovers import Leftovers
from tiered.train.existing_run import holds_any_file
from tiered.units import format_bytes

__all__ = ["clean"]


def clean(directories: Sequence[Path], *, dry_run: bool, yes: bool, json_file: Path | None) -> int:
    """List the leftovers in ``directories`` and remove them once that is agreed to; return 0. Blocks.

    Raises UsageError while the store is open, where there is neither a run nor a leftover, and where there is no
    terminal to ask on; nothing was removed then.
    """
    check_writable(json_file)
    with Leftovers(directories) as found:
        if not (found.items or found.spared or holds_any_file(directories)):
            raise UsageError(f"no run in {', '.join(map(str, directories))}, and nothing that one has left over")
        for item in found.items:
            say(f"{format_bytes(item.nbytes):>10}  {item}", indent=12)
        freed = 0
        if not found.items:
            print("nothing is left over")
        elif dry_run:
            print(f"{format_bytes(found.nbytes)} would be freed; nothing was removed")
        else:
            confirm(
                f"remove these for good, {format_bytes(found.nbytes)}?",
                unasked="gc removes what is listed above and there is no terminal to ask on: add --yes, or --dry-run",
                declined="nothing was removed",
                yes=yes,
            )
            freed = found.remove()
            print(f"freed {format_bytes(freed)} ({freed:,} bytes)")
        for spared in found.spared:
            say(f"left alone: {spared}", indent=12)
        if json_file is not None:
            write_report(json_file, f"{json.dumps(_as_json(found, freed, dry_run=dry_run))}\n")
    return 0


def _as_json(found: Leftovers, freed: int, *, dry_run: bool) -> dict[str, object]:
    items = [
        {"path": str(item.path), "what": item.what, "bytes": item.nbytes, "cut_at": item.end} for item in found.items
    ]
    return {"leftovers": items, "left_alone": found.spared, "freed_bytes": freed, "dry_run": dry_run}
