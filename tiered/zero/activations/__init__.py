"""What autograd saves between a forward and its backward: kept, recomputed, or swapped out and in again."""
