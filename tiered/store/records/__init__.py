"""All facts about keys, and which generation their bytes belong to. No I/O and no DRAM."""
