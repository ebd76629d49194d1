"""The keys and which of their tensors are in DRAM, their leases, and their swaps in and out: one object, one lock."""
