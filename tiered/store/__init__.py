"""Floor 2: key -> record -> bytes, with residency under a DRAM budget and atomic commits."""
