"""The description of a machine and its directories, checks of what works there, and how to mend the rest."""
