"""Floor 4: which bytes should be in which tier, and when they should move."""
