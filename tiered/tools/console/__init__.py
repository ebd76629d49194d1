"""The parts that all commands need of the terminal: interruption, questions, lasting streams, files for reports."""
