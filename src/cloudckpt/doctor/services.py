"""Services and what their documents promise, as ``docs/stores-seen.md`` shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files

COLUMNS = ("service", "create-if-absent", "parts", "list after write", "copy", "CRC32C", "consequence", "ran")


def read_services() -> list[dict[str, str]]:
    """Return the rows: each column in Markdown, and ``match``, a regular expression that `find_service` uses."""
    services: list[dict[str, str]] = json.loads(files(__package__).joinpath("services.json").read_text("utf-8"))
    return services


def find_service(scheme: str, *, host: str = "", server: str = "") -> Mapping[str, str] | None:
    """Return the row of a store by column, as plain text; None if no row applies.

    Args:
        scheme: The scheme of the URI; ``gs-zonal`` for a zonal bucket of GCS.
        host: The endpoint's host.
        server: The headers Server and x-amz-request-id of an answer; older Ceph has only the second.

    """
    asked = f"{scheme} {host} {server}"
    for row in read_services():
        if re.match(row["match"], asked):
            return {column: re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (\2)", row[column]) for column in COLUMNS}
    return None
