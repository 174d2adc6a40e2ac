"""Google Cloud Storage, on google-cloud-storage."""

from cloudckpt.stores.gcs.store import GCSStore

__all__ = ["GCSStore"]
