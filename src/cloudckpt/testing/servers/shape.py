"""What all servers have in common, so that one test can be run against each."""

from __future__ import annotations

from typing import Any, Protocol


class Server(Protocol):
    """An object store that runs on this machine for the sake of a test."""

    @property
    def name(self) -> str:
        """What it is, in messages and in the names of tests."""

    @property
    def endpoint_url(self) -> str:
        """Where it answers; the same after a restart."""

    @property
    def pid(self) -> int:
        """The process that serves; another one after a restart."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and neither killed nor ended by itself."""

    @property
    def keeps_data(self) -> bool:
        """Whether objects that it took are there after `kill` and `restart`."""

    @property
    def scheme(self) -> str:
        """Of the URIs of what lies on it: ``s3`` or ``gs``."""

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `cloudckpt.Options.storage_options` need to reach it."""

    @property
    def environment(self) -> dict[str, str]:
        """What the store's ordinary clients need to reach it, over what `clean_environment` leaves."""

    def create_bucket(self, name: str) -> None:
        """Create the bucket `name`; one that exists is left as it is."""

    def kill(self) -> None:
        """SIGKILL. On return it is gone, and connections are refused. Nothing happens where it is down already."""

    def restart(self) -> None:
        """Start it again at the same address, after killing it where it still runs. On return it answers."""
