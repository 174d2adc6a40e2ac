"""Where a rank can be reached from other machines, while one load goes on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
from dataclasses import dataclass, field

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
_BACKLOG = 1024
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What a rank tells the others, over their process group, of where it listens."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """Who comes shows this one, and gets nothing before."""
    answer: bytes = field(repr=False)
    """Who is come to shows this one."""


class Entrance:
    """A socket that listens on the address by which this machine reaches the others, and on no other."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        host, port = listener.getsockname()[:2]
        self.door = Door(
            host=host, port=port, key=secrets.token_bytes(TOKEN_BYTES), answer=secrets.token_bytes(TOKEN_BYTES)
        )

    @classmethod
    def new(cls) -> Entrance | None:
        """None where it is not known how others reach this machine, or nothing can listen there."""
        host = own_host()
        if host is None:
            return None
        try:
            listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError:
            return None
        listener.setblocking(False)  # noqa: FBT003  # the library's signature
        return cls(listener)

    def close(self) -> None:
        """Who comes now is refused, and who waits before it hears that it is closed."""
        self.listener.close()


def own_host() -> str | None:
    """The address that gloo would take: of ``GLOO_SOCKET_IFNAME``, else the one on the way to the job's first rank.

    Never one that means another machine on another machine, unless the interface was named.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named:
        return _host_of_interface(named)
    for host in (os.environ.get("MASTER_ADDR", ""), socket.gethostname()):
        found = _host_towards(host) if host else None
        if found is not None and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found
    return None


def _host_of_interface(name: str) -> str | None:
    try:
        import fcntl  # noqa: PLC0415  # not on Windows
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _ADDRESS_OF_INTERFACE, request)[20:24])
    return None


def _host_towards(host: str) -> str | None:
    """Of this machine, on the way there. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as any_socket:
            any_socket.connect(address)
            return str(any_socket.getsockname()[0])
    except (OSError, UnicodeError):  # of a label that DNS has no room for
        return None
