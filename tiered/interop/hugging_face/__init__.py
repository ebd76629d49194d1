"""Models and the Trainer of transformers over a store; their door is tiered.hf."""
