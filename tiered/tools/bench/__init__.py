"""`tiered bench`: the bandwidth of the drives for tensor swap, measured beside fio, with a verdict in one line."""
