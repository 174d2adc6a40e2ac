"""Stores hold the objects of checkpoints. They know bytes and keys, and no tensors."""

from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

__all__ = ["Store", "open_store"]
