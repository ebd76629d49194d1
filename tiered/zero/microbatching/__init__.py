"""Several micro-batches through a model unit by unit: lanes that take turns, each with its own random numbers."""
