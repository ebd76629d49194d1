"""Whole tensors in and out, by copy: one at a time, large ones block by block, small ones in batches."""
