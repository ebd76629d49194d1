"""Waiting: with a deadline, in forks, for whom and how long; and calls from within calls, which must not wait."""
