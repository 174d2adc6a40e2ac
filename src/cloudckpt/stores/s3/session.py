"""One bucket, as its callers see it: requests go in, answers or cloudckpt's own errors come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cloudckpt.errors import CredentialsError, StoreError
from cloudckpt.stores._http_errors import masked
from cloudckpt.stores.s3 import client as clients
from cloudckpt.stores.s3.express import PERMISSION, is_directory_bucket
from cloudckpt.stores.s3.translate import PERMISSIONS, Request, translate, translate_code


class S3Session:
    """Makes requests about one bucket. Safe to share between threads; can be pickled; survives a fork."""

    def __init__(self, bucket: str, key: clients.ClientKey) -> None:
        self.bucket = bucket
        self._key = key
        self._environment = clients.ambient()
        self._sharing: set[object] = set()
        self._client: clients.S3Client | None = None

    def __getstate__(self) -> tuple[str, clients.ClientKey]:
        return self.bucket, self._key

    def __setstate__(self, state: tuple[str, clients.ClientKey]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def client_key(self) -> clients.ClientKey:
        """What its client is made of."""
        return self._key

    @contextlib.contextmanager
    def share_of_connections(self) -> Iterator[Callable[[], int]]:
        """How many requests at once are this block's, which changes as others begin and end theirs. At least one."""
        mine = object()
        self._sharing.add(mine)
        try:
            yield lambda: max(self._key.connections // len(self._sharing), 1)
        finally:
            self._sharing.discard(mine)

    def boto3_client(self, operation: str) -> Any:
        """boto3's own client, for questions that the store has no method for. Raises as `endpoint_url` does."""
        self.endpoint_url(operation)
        return clients.client_for(self._key, self._environment).boto3_client

    def endpoint_url(self, operation: str) -> str:
        """Where requests go, asked on behalf of the store's `operation`.

        Raises `StoreError` where the AWS configuration cannot be used.
        """
        try:
            return clients.client_for(self._key, self._environment).endpoint_url
        except Exception as error:
            translated = self.translate(error, operation, "PutObject", "")
            if translated is None:
                raise
            raise translated from None

    def url(self, key: str) -> str:
        """The full address of `key`, a key of the bucket."""
        return f"s3://{self.bucket}/{key}"

    def call(self, operation: str, api: str, key: str | None, **members: Any) -> dict[str, Any]:
        """Make the request `api` about `key`, or about the bucket, on behalf of the store's `operation`.

        Raises `StoreError` subclasses.
        """
        about = {"Bucket": self.bucket} if key is None else {"Bucket": self.bucket, "Key": key}
        client: clients.S3Client | None = None
        try:
            client = self._client = clients.client_for(self._key, self._environment)
            return client.call(api, **about, **members)
        except Exception as error:
            translated = self.translate(error, operation, api, key or members.get("Prefix", ""))
            if translated is None:
                raise
            if isinstance(translated, CredentialsError) and client is not None:
                clients.forget(client)
            # Not chained: the texts and attributes of HTTP errors can hold headers, and with them tokens.
            raise translated from None

    def translate(self, error: Exception, operation: str, api: str, key: str) -> StoreError | None:
        """What to raise for `error`; ``None`` where it is not the store's."""
        return translate(error, self._request(operation, api, key))

    def translate_code(self, code: str, detail: str, operation: str, api: str, key: str) -> StoreError:
        """What to raise for one key's `code` in an answer that covers many."""
        return translate_code(code, detail, self._request(operation, api, key))

    def required(self, answer: dict[str, Any], name: str, operation: str, api: str, key: str) -> Any:
        """What `answer` has under `name`; whoever answers without it is not S3."""
        if name not in answer:
            raise self.error(
                StoreError,
                operation,
                key,
                f"the answer to {api} has no {name}: it is not S3's. Check endpoint_url, and proxies on the way.",
            )
        return answer[name]

    def error(self, cls: type[StoreError], operation: str, key: str, what: str, **attributes: Any) -> StoreError:
        """An error of our own about `key`."""
        url = self.url(key).rstrip("/")
        return cls(f"{url}: {masked(what, self._secrets)}", key=url, operation=operation, **attributes)

    @property
    def _secrets(self) -> tuple[str, ...]:
        return self._key.config.secrets if self._client is None else self._client.secrets

    def _request(self, operation: str, api: str, key: str) -> Request:
        return Request(
            operation=operation,
            api=api,
            url=self.url(key).rstrip("/"),
            bucket=self.bucket,
            endpoint=clients.endpoint_of(self._key, self._environment),
            permission=self._permission(api),
            secrets=self._secrets,
        )

    def _permission(self, api: str) -> str:
        """What must be granted for `api` with these options."""
        config = self._key.config
        needed = [PERMISSION if is_directory_bucket(self.bucket) else PERMISSIONS[api]]
        if config.tagging and api in ("CopyObject", "CreateMultipartUpload", "PutObject"):
            needed.append("s3:PutObjectTagging")
        if config.kms_key_id:
            needed.append("kms:GenerateDataKey and kms:Decrypt on the KMS key")
        return ", ".join(needed)
