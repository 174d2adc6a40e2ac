"""Every server that the integration tests run against, under the name by which it is chosen.

Each is a `cloudckpt.testing.servers.Server`, started by calling its maker, and gone with the context that that returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.integration.servers.ceph import ceph_rgw
from tests.integration.servers.gcp_emulator import gcp_storage_emulator
from tests.integration.servers.ministack import ministack

from cloudckpt.testing.servers import Server, fake_gcs_server, moto_server

__all__ = ["SERVERS"]

SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "moto": moto_server,
    "rgw": ceph_rgw,
    "ministack": ministack,
    "fake-gcs": functools.partial(fake_gcs_server, keeps_data=True),
    "gcp-emulator": gcp_storage_emulator,
}
