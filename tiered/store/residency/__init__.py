"""Which tensors are in DRAM under the budget, who leases them, and how they come and go."""
