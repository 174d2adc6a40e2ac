"""Stores: the places that checkpoints lie in. They know bytes and keys, and nothing of tensors."""
