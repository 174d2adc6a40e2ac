"""A job of many ranks, simulated in one process: what its checkpoints cost apart from their bytes."""
