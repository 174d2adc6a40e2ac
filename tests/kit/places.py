"""The stores that the tests save to, looked at and damaged by code that is not cloudckpt's."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any


class Place(abc.ABC):
    """One empty place on one kind of store. Keys are relative to it."""

    root: str

    def uri(self, name: str = "checkpoint") -> str:
        """Return the URI of a checkpoint of this name."""
        return f"{self.root}/{name}"

    @abc.abstractmethod
    def keys(self) -> list[str]:
        """Every object here, sorted."""

    @abc.abstractmethod
    def read(self, key: str) -> bytes:
        """The object's bytes."""

    @abc.abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Put or replace an object."""

    @abc.abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object."""

    @abc.abstractmethod
    def num_unfinished_uploads(self) -> int:
        """Return the number of uploads that were neither completed nor aborted."""

    def data_keys(self) -> list[str]:
        """The data objects of all checkpoints here."""
        return [key for key in self.keys() if key.endswith(".safetensors")]

    def manifest_keys(self) -> list[str]:
        """The manifests of all checkpoints here."""
        return [key for key in self.keys() if key.rpartition("/")[2].startswith("manifest")]

    def contents(self) -> dict[str, bytes]:
        """Return all objects here."""
        return {key: self.read(key) for key in self.keys()}


class LocalPlace(Place):
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = str(directory)

    def keys(self) -> list[str]:
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.directory).as_posix() for path in files)

    def read(self, key: str) -> bytes:
        return (self.directory / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, key: str) -> None:
        (self.directory / key).unlink()

    def num_unfinished_uploads(self) -> int:
        return 0  # an unfinished write would be a file, which keys() shows


class BucketPlace(Place):
    """A prefix of a bucket of its own, on an object store."""

    scheme: str

    def __init__(self, client: Any, bucket: str, prefix: str = "run") -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = prefix
        self.root = f"{self.scheme}://{bucket}/{prefix}"

    @abc.abstractmethod
    def options_at(self, endpoint_url: str) -> dict[str, Any]:
        """The storage options with which its URI leads to another address."""


class S3Place(BucketPlace):
    """A place on S3, or on a store with its protocol, through boto3."""

    scheme = "s3"

    def options_at(self, endpoint_url: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint_url}

    def keys(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return sorted(key.removeprefix(f"{self.prefix}/") for key in keys)

    def read(self, key: str) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")
        data: bytes = answer["Body"].read()
        return data

    def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")

    def num_unfinished_uploads(self) -> int:
        return len(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []))


class GCSPlace(BucketPlace):
    """A place on GCS, through Google's client."""

    scheme = "gs"

    def options_at(self, endpoint_url: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint_url, "anonymous": True}

    def keys(self) -> list[str]:
        blobs = self.client.list_blobs(self.bucket, prefix=f"{self.prefix}/")
        return sorted(blob.name.removeprefix(f"{self.prefix}/") for blob in blobs)

    def read(self, key: str) -> bytes:
        data: bytes = self._blob(key).download_as_bytes()
        return data

    def write(self, key: str, data: bytes) -> None:
        self._blob(key).upload_from_string(data)

    def remove(self, key: str) -> None:
        self._blob(key).delete()

    def num_unfinished_uploads(self) -> int:
        return 0  # the parts of an unfinished upload would be objects, which keys() shows

    def _blob(self, key: str) -> Any:
        return self.client.bucket(self.bucket).blob(f"{self.prefix}/{key}")
