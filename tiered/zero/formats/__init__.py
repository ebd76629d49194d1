"""Formats of optimizer state: which bytes a store keeps of a parameter, and how one tile of them is updated."""
