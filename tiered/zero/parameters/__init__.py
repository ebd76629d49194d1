"""Parameters that fault in: units, who may touch which of their bytes when, and what they are when nobody may."""
