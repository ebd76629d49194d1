"""The format on disk: rows and their digests, extents, specs and the text of a state. No I/O."""
