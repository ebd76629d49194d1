"""The bytes of a store's devices: which are free, who gets which, and how fast each device moves them."""
