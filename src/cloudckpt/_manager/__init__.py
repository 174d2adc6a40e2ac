"""What `cloudckpt.CheckpointManager` is made of: which steps there are, which of them stay, and removing the others."""
