"""Floor 3a: which bytes should be in which tier, and when they should move."""
