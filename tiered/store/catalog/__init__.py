"""The durable index of a store: rows, their checks, and the SQLite file that they are in."""
