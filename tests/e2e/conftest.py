"""Fixtures of the end-to-end tests and of the command line's: places on the stores that ``--places`` names.

A test that asks for `place` and is marked ``every_store`` runs on each of them, one that asks for `bucket` on each that
is an object store. All others prove what does not depend on the store: one that asks for `s3` runs where that is among
the chosen, and the rest on a directory, where ``local`` is. So ``--places rgw`` runs what a Ceph RADOS Gateway could
break, there alone, and ``--places s3,rgw`` in addition what asks for `s3`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.integration.conftest import make_fresh_bucket
from tests.integration.servers import SERVERS, Servers
from tests.kit.moto import locked_s3_server
from tests.kit.places import BucketPlace, GCSPlace, LocalPlace, Place, S3Place

from cloudckpt.testing.servers import S3Server, Server

FIXTURES = {"local": "local", "s3": "s3"} | dict.fromkeys(SERVERS, "on_server")
"""The fixture of each place: a directory, moto in this process, or a server of the integration tests."""

FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "cli")


def _chosen(config: pytest.Config) -> list[str]:
    names = [name.strip() for name in config.getoption("--places").split(",")]
    unknown = sorted(set(names) - set(FIXTURES))
    if unknown:
        raise pytest.UsageError(f"--places: there is no {', '.join(unknown)}; there are {', '.join(FIXTURES)}")
    return names


def stores_of(config: pytest.Config) -> list[str]:
    """Return the chosen places, without moto beside a server that is stricter."""
    names = _chosen(config)
    return [name for name in names if name != "s3" or not {"rgw", "ministack"} & {*names}]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run on each chosen place what is marked so, and the rest on a directory."""
    if "place" in metafunc.fixturenames:
        is_marked = metafunc.definition.get_closest_marker("every_store") is not None
        metafunc.parametrize("place", stores_of(metafunc.config) if is_marked else ["local"], indirect=True)
    if "bucket" in metafunc.fixturenames:
        # Of none, pytest would make a skipped test; one on a place that is not chosen is left out below.
        buckets = [name for name in stores_of(metafunc.config) if name != "local"]
        metafunc.parametrize("bucket", buckets or ["s3"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is tied to a place that is not chosen."""
    names = set(_chosen(config))
    ours = [item for item in items if any(item.path.is_relative_to(folder) for folder in FOLDERS)]
    left_out = {item for item in ours if not _places_of(item) <= names}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def _places_of(item: pytest.Item) -> set[str]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    asked = {parameters[name] for name in ("place", "bucket") if name in parameters}
    tied = {name for name in ("local", "s3") if name in getattr(item, "fixturenames", ())}
    return (asked | tied) or {"local"}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server of this process's own."""
    with locked_s3_server() as server:
        yield server


@pytest.fixture
def local(tmp_path: Path) -> LocalPlace:
    """An empty directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    return LocalPlace(directory)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    """An empty bucket on moto, in this process."""
    return _s3_place(s3_server, monkeypatch)


@pytest.fixture
def on_server(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], BucketPlace]]:
    """Make an empty bucket on the server of a name."""
    with ExitStack() as stack:

        def make(name: str) -> BucketPlace:
            server = servers.up(name)
            if server.scheme == "s3":
                return _s3_place(server, monkeypatch)
            bucket = make_fresh_bucket(server, monkeypatch)
            client = stack.enter_context(closing(storage.Client(credentials=AnonymousCredentials())))
            return GCSPlace(client, bucket)

        yield make


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Each chosen place in turn."""
    return _place_named(request.param, request)


@pytest.fixture
def root(place: Place) -> str:
    """The place's URI, which ranks can be given."""
    return place.root


@pytest.fixture
def uri(place: Place) -> str:
    """The URI of one checkpoint on the place, which ranks can be given."""
    return place.uri()


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> BucketPlace:
    """Each chosen place in turn that is an object store."""
    found = _place_named(request.param, request)
    assert isinstance(found, BucketPlace)
    return found


def _place_named(name: str, request: pytest.FixtureRequest) -> Place:
    found: Any = request.getfixturevalue(FIXTURES[name])
    place: Place = found(name) if name in SERVERS else found
    return place


def _s3_place(server: Server, monkeypatch: pytest.MonkeyPatch) -> S3Place:
    bucket = make_fresh_bucket(server, monkeypatch)
    client: Any = boto3.client("s3")
    return S3Place(client, bucket)
