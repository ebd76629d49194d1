"""Loaders of batches that a store can commit and resume."""
