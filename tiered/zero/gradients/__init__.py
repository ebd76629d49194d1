"""Gradients: the place of a unit's gradients, the moment they are final, and the operations on all of them at once."""
