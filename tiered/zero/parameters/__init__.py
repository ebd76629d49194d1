"""Parameters that fault in: units, the right to touch their bytes, and the stand-ins while no call has that right."""
