"""From opening to the end: directories found, named and locked; what a store takes and gives back; leftovers."""
