"""The durable index of a store: the SQLite file that holds its rows."""
