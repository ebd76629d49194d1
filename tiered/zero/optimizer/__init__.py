"""The streaming optimizer: update rules, the state in the store, and the pipeline that reads, updates and writes it."""
