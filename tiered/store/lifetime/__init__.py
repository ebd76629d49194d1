"""From opening to the end: directories found, named and locked; resources taken and given back; leftovers."""
