"""What belongs to which generation, and how a commit makes one durable: all of it or nothing."""
