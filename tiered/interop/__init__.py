"""Interop: models, checkpoints and configurations of other libraries, in and out, a tensor at a time."""
