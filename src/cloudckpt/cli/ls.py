"""``cloudckpt ls``."""

from __future__ import annotations

from typing import Annotated

import typer

from cloudckpt.cli._console import Console
from cloudckpt.cli._options import AsJSON, EndpointURL, Quiet, StorageOptions, options_of
from cloudckpt.cli._text import age


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The folder that the checkpoints lie in.")],
    *,
    storage_option: StorageOptions = None,
    endpoint_url: EndpointURL = None,
    as_json: AsJSON = False,
    quiet: Quiet = False,
) -> None:
    """List the checkpoints under ROOT, the oldest first.

    Example: cloudckpt ls s3://bucket/run
    """
    from cloudckpt.catalog import list_checkpoints

    console = Console(as_json=as_json, quiet=quiet)
    found = list_checkpoints(root, options=options_of(storage_option, endpoint_url))
    if as_json:
        console.document(
            [{"name": one.name, "uri": one.uri, "committed_at": one.committed_at.isoformat()} for one in found]
        )
        return
    console.table(["NAME", "AGE", "URI"], [[one.name, age(one.committed_at), one.uri] for one in found])
