"""Kernels: compiled loops that do in one pass what a format does by torch operations. They know plain memory only."""
