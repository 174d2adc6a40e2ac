"""The manifest: the one document that makes a checkpoint. Knows no store, and torch only in `_torch_metadata`."""
