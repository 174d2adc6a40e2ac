"""Two checkpoints, read side by side."""
