"""``python -m tiered`` is the command ``tiered``; ``torchrun -m tiered train`` runs it on each rank."""

from __future__ import annotations

import sys

from tiered.tools.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
