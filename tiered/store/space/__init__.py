"""The bytes of a store's devices: the free ones, the shares of each device, and how fast each device moves them."""
