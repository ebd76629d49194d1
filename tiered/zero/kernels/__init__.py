"""Kernels: compiled loops that do a format's torch operations in one pass. They know plain memory only."""
