"""``cloudckpt dev-server``."""

from __future__ import annotations

import shlex
import time
from enum import Enum
from typing import Annotated

import typer

_POLL_S = 0.2


class _Kind(str, Enum):
    s3 = "s3"
    gcs = "gcs"


def dev_server(
    kind: Annotated[_Kind, typer.Argument(help="The service whose API the server speaks.")] = _Kind.s3,
    *,
    bucket: Annotated[str, typer.Option(metavar="NAME", help="The bucket that is made.")] = "bucket",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; 0 is a free one.")] = 0,
) -> None:
    """Run a store with a bucket on this machine, to try cloudckpt without an account, until Ctrl-C.

    It accepts any credentials. Objects are kept in memory, and are lost at the end. Stdout gets the exports for
    another shell.

    Example: cloudckpt dev-server s3 --port 9000
    """
    from cloudckpt.testing.servers import fake_gcs_server, moto_server

    with (moto_server if kind is _Kind.s3 else fake_gcs_server)(port=port) as server:
        server.create_bucket(bucket)
        typer.echo(f"{server.name} answers at {server.endpoint_url}. In another shell, paste:\n", err=True)
        for name, value in server.environment.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        uri = f"{server.scheme}://{bucket}/run"
        typer.echo(f"\nand then save to {uri}, or run: cloudckpt doctor {uri}", err=True)
        typer.echo("The server accepts any credentials, from programs on this machine alone.", err=True)
        typer.echo("Ctrl-C ends the server. Its objects are in memory, and are lost then.", err=True)
        try:
            while server.is_running:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # the way to end it, and no error
            return
        raise RuntimeError(f"{server.name} has ended")
