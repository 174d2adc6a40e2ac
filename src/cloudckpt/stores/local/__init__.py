"""Files of a local or mounted file system."""

from cloudckpt.stores.local.store import LocalStore

__all__ = ["LocalStore"]
