"""The environment of tests: nothing in it leads a client to a real store."""

from __future__ import annotations

import os
from collections.abc import Mapping

_UNWANTED = (
    "ALL_PROXY",
    "API_ENDPOINT_OVERRIDE",  # google-cloud-storage's
    "AWS_",
    "BOTO_",
    "CLOUDSDK_",
    "GCE_METADATA_",
    "GCLOUD_",
    "GCSFS_",
    "GOOGLE_",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "MOTO_",
    "NO_GCE_CHECK",
    "STORAGE_EMULATOR_HOST",
)
_NOWHERE = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    # Application-default credentials lie below it, and there is nothing below a file.
    "CLOUDSDK_CONFIG": os.devnull,
    "NO_GCE_CHECK": "true",
}


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environment` (this process's, if ``None``) without what would lead AWS and Google clients elsewhere.

    Profiles, credentials, endpoints and proxies of the user's own would send a test's requests to a real
    store.
    """
    source = os.environ if environment is None else environment
    kept = {name: value for name, value in source.items() if not name.upper().startswith(_UNWANTED)}
    return {**kept, **_NOWHERE}
