"""The doors to other programs' files: checkpoints of other libraries, and the configurations of other engines."""
