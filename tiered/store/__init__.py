"""Floor 3: key -> record -> bytes, with residency under a DRAM budget and atomic commits."""
