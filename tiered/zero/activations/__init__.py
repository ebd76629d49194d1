"""Activations: the tensors autograd saves for a backward are kept, recomputed, or swapped out and in again."""
