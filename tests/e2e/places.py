"""The stores that the tests save to, looked at and damaged by code that is not cloudckpt's."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any


class Place(abc.ABC):
    """One empty place on one kind of store. Keys are relative to it."""

    kind: str
    root: str

    def uri(self, name: str = "checkpoint") -> str:
        """Where a checkpoint of this name lies."""
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
        """How many uploads were begun and neither completed nor aborted."""

    def data_keys(self) -> list[str]:
        """The data objects of all checkpoints here."""
        return [key for key in self.keys() if key.endswith(".safetensors")]

    def manifest_keys(self) -> list[str]:
        """The manifests of all checkpoints here."""
        return [key for key in self.keys() if key.rpartition("/")[2].startswith("manifest")]

    def contents(self) -> dict[str, bytes]:
        """Everything that lies here."""
        return {key: self.read(key) for key in self.keys()}


class LocalPlace(Place):
    """A directory."""

    kind = "local"

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


class S3Place(Place):
    """A bucket of its own, under a prefix."""

    kind = "s3"

    def __init__(self, client: Any, bucket: str, prefix: str = "run") -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = prefix
        self.root = f"s3://{bucket}/{prefix}"

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
