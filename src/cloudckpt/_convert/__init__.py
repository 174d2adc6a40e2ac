"""Checkpoints from store to store, and to and from other formats. See ``docs/design/023-copies-and-exports.md``."""
