"""Gradients: where a unit's lie, when they are final, and what is done to all of them at once."""
