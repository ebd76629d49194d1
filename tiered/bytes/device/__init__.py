"""Devices: raw aligned bytes at offsets of numbered files; ``base`` is the contract."""
