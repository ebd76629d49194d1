"""Rows of tensors: any blocks of a record read and written in one round, and the tables that consist of rows."""
