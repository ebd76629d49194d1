"""The bytes of a store's devices: the free ones, and the equal shares of each device."""
