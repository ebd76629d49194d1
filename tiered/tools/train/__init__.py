"""The main job: train a byte-level GPT larger than its memory budget on text files, and go on where it stopped."""
