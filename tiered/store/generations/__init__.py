"""How a commit makes a generation durable, all of it or nothing, and the way back."""
