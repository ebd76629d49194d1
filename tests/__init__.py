"""The suite; it mirrors the source."""
