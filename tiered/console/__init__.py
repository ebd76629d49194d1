"""What every command needs of the terminal: interruption, questions, streams that may close, files for reports."""
