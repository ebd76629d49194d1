"""Floor 3b: the collectives of several ranks. Floor 3a is beside it, and neither knows the other."""
