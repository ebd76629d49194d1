"""Blocks on their way between memory and devices, each under its digest."""
