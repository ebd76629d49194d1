"""The place of the command before it was one of the tools: who imports it hears where the command is."""

from __future__ import annotations

from tiered.removed import refuse_removed

__all__ = ["main"]  # noqa: F822 - it is gone

refuse_removed("tiered.cli")
