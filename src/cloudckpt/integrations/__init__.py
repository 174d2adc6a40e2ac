"""cloudckpt inside of frameworks. A module each, which imports its framework; nothing else here does."""
