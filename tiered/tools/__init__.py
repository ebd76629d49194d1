"""The commands: each imports the library, which imports none of them; `tiered.tools.cli` reads their options."""
