"""What a machine and its directories are, what works there, and how to mend what does not."""
