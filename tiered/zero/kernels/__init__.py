"""Kernels: compiled loops that do in one pass what the formats do by torch operations, bit for bit, once tried."""
