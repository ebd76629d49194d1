"""The tensors in DRAM under the budget, their leases, and their swaps in and out."""
