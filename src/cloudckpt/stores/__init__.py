"""Stores: the places that checkpoints lie in. They know bytes and keys, and nothing of tensors."""

from cloudckpt.stores.base import Store
from cloudckpt.stores.open import open_store

__all__ = ["Store", "open_store"]
