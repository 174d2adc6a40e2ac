"""Google Cloud Storage, on google-cloud-storage."""

from __future__ import annotations

from cloudckpt.stores.gcs.store import GCSStore

__all__ = ["GCSStore"]
