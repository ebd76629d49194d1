"""Formats of optimizer state: the bytes that a store keeps of a parameter, and the update of one tile of them."""
