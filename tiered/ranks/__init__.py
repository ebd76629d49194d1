"""Floor 2: the ranks that train one model together, and their collectives on raw bytes."""
