"""Whatever stands in the way of a save is found, is told with what to do, and nothing is left of the search."""

from __future__ import annotations

import re
import time
from email.message import Message
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Run
from tests.kit.options import make_options
from tests.kit.places import Place, S3Place
from tests.kit.wire import Reply, Wire, WireRule
from tests.kit.wrapped import FaultyStore, WrappedStore

from cloudckpt import Options
from cloudckpt.doctor import DoctorReport, environment, examine
from cloudckpt.doctor.environment import find_service
from cloudckpt.errors import AccessDeniedError, StoreError
from cloudckpt.stores.base import Store
from cloudckpt.testing.faults import Faults

WRITTEN_MARK = ".cloudckpt-probe-"
MOTO = {"checksums", "lifecycle"}
"""Moto fails these checks: it takes wrong checksums, and the bucket has no rule."""


def failed(report: DoctorReport) -> set[str]:
    return {check.name for check in report.failures}


def through(wire: Wire, **more: Any) -> Options:
    return make_options(storage_options={"endpoint_url": wire.url}, **more)


@pytest.mark.every_store
def test_a_healthy_place_passes_and_is_left_unchanged(place: Place) -> None:
    """If this fails, a good store is called ill, or the doctor leaves objects that are paid for."""
    report = examine(place.uri())
    assert report.is_healthy, str(report)
    assert failed(report) <= MOTO
    needed = ("list", "put", "get", "range reads", "head", "delete", "listings", "create-if-absent", "parts", "abort")
    assert {report[name].outcome for name in needed} == {"passed"}
    assert place.keys() == []
    assert place.num_unfinished_uploads() == 0


def test_the_command_fails_if_a_check_that_matters_failed(tmp_path: Path, run: Run) -> None:
    """If this fails, a script that asks before it trains is told yes, or a user is left without advice."""
    (tmp_path / "file").write_text("")
    ended = run("doctor", f"{tmp_path}/file/run")
    assert (ended.code, "✗  put" in ended.out) == (1, True)
    assert "A file is where a directory is needed" in ended.out
    document = run("doctor", f"{tmp_path}/file/run", "--json").document
    assert not document["is_healthy"]
    assert "put" in [check["name"] for check in document["checks"] if check["outcome"] == "failed"]


@pytest.mark.every_store
def test_the_speed_of_a_fast_place_is_measured(place: Place, tmp_path: Path) -> None:
    """If this fails, a user learns how long a save and its copy take when a host goes away; or what was measured with
    fills the drive.
    """
    fast = tmp_path / "nvme" / "run"
    report = examine(place.uri("run"), fast=fast, num_bytes=10**9, options=make_options(connections=2))
    rates = {}
    for name, what in (("fast save", "save"), ("drain", "copy"), ("drain beside training", "copy")):
        assert report[name].outcome == "passed", report[name]
        found = re.fullmatch(r"([\d.]+) (MB|GB)/s by 2 \w+: a (\w+) of 953.7 MiB takes (.*)", report[name].found)
        assert found is not None, report[name].found
        assert found[3] == what
        rates[name] = float(found[1]) * (1000 if found[2] == "GB" else 1)
        took_s = 1000 / rates[name]
        unit = 1000 if found[4].endswith("ms") else 1
        assert float(found[4].split()[0]) / unit >= 0.8 * took_s  # more where the fast place cannot be read so fast
    assert not fast.exists()
    assert not any(WRITTEN_MARK in key for key in place.contents())


def test_a_fast_place_that_is_too_small_or_read_only_fails_the_check(tmp_path: Path) -> None:
    """If this fails, a run that is meant to save fast sends everything to its bucket."""
    report = examine(tmp_path / "bucket", fast=tmp_path / "nvme", num_bytes=2**60, options=make_options(connections=1))
    assert "are free, and a save takes" in report["fast save"].found
    assert "to the root instead" in str(report)
    (tmp_path / "file").touch()
    report = examine(tmp_path / "bucket", fast=tmp_path / "file" / "nvme", options=make_options(connections=1))
    assert report["fast save"].outcome == "failed"
    assert report.is_healthy


def test_a_fast_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """If this fails, a mistyped path looks well, and a restart goes back to the last step of the bucket."""
    report = examine(tmp_path / "bucket", fast=tmp_path / "nvmee", options=make_options(connections=1))
    assert report["fast place"].found == f"{tmp_path / 'nvmee'} does not exist. The first save makes it"
    assert "check the path, and that the drive is mounted" in str(report)
    assert report.is_healthy
    (tmp_path / "nvme").mkdir()
    report = examine(tmp_path / "bucket", fast=tmp_path / "nvme", options=make_options(connections=1))
    assert not report.failures


def test_the_doctor_removes_the_folder_that_it_made(tmp_path: Path) -> None:
    """If this fails, a report leaves empty folders, or removes some that were there before."""
    (tmp_path / "old").mkdir()
    assert examine(tmp_path / "old" / "new" / "run").is_healthy
    assert [*tmp_path.rglob("*")] == [tmp_path / "old"]
    assert examine(tmp_path / "old").is_healthy
    assert [*tmp_path.rglob("*")] == [tmp_path / "old"]


@pytest.mark.every_store
def test_the_doctor_writes_nothing_with_read_only(place: Place) -> None:
    """If this fails, whoever only loads is told that writing is denied."""
    place.write("checkpoint/manifest.json", b"{}")
    faults = Faults()
    report = examine(place.uri(), read_only=True, options=make_options(wrap_store=faults))
    assert report.is_healthy
    assert report["get"].outcome == "passed"
    assert set(faults.num_calls) <= {"list", "read_into"}
    assert {"put", "free space"}.isdisjoint(check.name for check in report.checks)
    assert "cloudckpt verify" in str(report)


def test_a_missing_bucket_is_named_as_such(s3: S3Place) -> None:
    """If this fails, a mistyped bucket is called a permission or a network that is missing."""
    report = examine("s3://no-such-bucket/run")
    assert failed(report) == {"bucket"}
    assert not report.is_healthy
    assert "Create it, or correct its name" in report["bucket"].advice
    assert report["put"].outcome == "skipped"


def test_an_unreachable_endpoint_is_one_fault(s3: S3Place) -> None:
    """If this fails, a wrong endpoint_url is taken for one fault of many, or is waited for."""
    with Wire("http://127.0.0.1:1") as wire:
        url = wire.url
    report = examine(s3.uri(), options=Options(storage_options={"endpoint_url": url}))
    assert failed(report) == {"endpoint"}
    assert "endpoint_url" in report["endpoint"].advice
    assert all(check.outcome == "skipped" for check in report.checks if check.name != "endpoint")
    assert str(report).count("not asked") == 1


def test_an_unknown_access_key_is_told_from_missing_permissions(s3: S3Place) -> None:
    """If this fails, wrong credentials are not told from missing permissions."""
    body = b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown</Message></Error>"
    refuse = Reply(status=403, body=body)
    with Wire(_endpoint(s3), WireRule(action=refuse, times=None)) as wire:
        report = examine(s3.uri(), options=through(wire))
    assert failed(report) == {"credentials"}
    assert "Check keys, profile and region" in report["credentials"].advice
    busy = Reply(status=503, body=body.replace(b"InvalidAccessKeyId", b"SlowDown"))
    with Wire(_endpoint(s3), WireRule(action=busy, times=None)) as wire:
        assert examine(s3.uri(), options=through(wire))["endpoint"].found == f"{wire.url} throttles requests"


def test_a_wrong_clock_is_named_as_the_cause(s3: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, refusals because of a wrong clock are looked for in the credentials."""
    headers = Message()
    headers["date"] = formatdate(time.time() - 3600.0, usegmt=True)
    monkeypatch.setattr(environment, "request_headers", lambda *_, **__: headers)
    report = examine(s3.uri())
    assert failed(report) == MOTO | {"clock"}
    assert "ahead of" in report["clock"].found
    assert "NTP" in report["clock"].advice


@pytest.mark.parametrize(
    ("scheme", "host", "server", "service"),
    [
        ("s3", "s3.eu-west-1.amazonaws.com", "AmazonS3", "Amazon S3"),
        ("s3", "127.0.0.1", "Ceph Object Gateway (squid) tx0", "Ceph"),
        ("s3", "127.0.0.1", " tx000002d786150be9904b4-006b074259-1008-default", "Ceph"),
        ("s3", "minio.example", "MinIO", "MinIO"),
        ("s3", "0123abcd.eu.r2.cloudflarestorage.com", "cloudflare", "Cloudflare R2"),
        ("s3", "t3.storage.dev", "", "Tigris"),
        ("s3", "fly.storage.tigris.dev", "", "Tigris"),
        ("s3", "cwobject.com", "", "CoreWeave"),
        ("s3", "cwlota.com", "", "CoreWeave"),
        ("s3", "name.compat.objectstorage.us-ashburn-1.oraclecloud.com", "", "OCI"),
        ("s3", "s3.hf.co", "", "Hugging Face Buckets (https"),
        ("hf", "", "", "Hugging Face Buckets (hf"),
        ("gs", "storage.googleapis.com", "", "Google Cloud Storage"),
        ("gs-zonal", "storage.googleapis.com", "", "Google Cloud Storage, zonal"),
        ("abfss", "", "", "Azure"),
        ("s3", "r2.cloudflarestorage.com.example", "", None),
        ("s3", "localhost", "Werkzeug", None),
        ("file", "", "", None),
    ],
)
def test_the_row_of_each_service(scheme: str, host: str, server: str, service: str | None) -> None:
    """If this fails, a user reads the promises of another service than theirs, or none."""
    row = find_service(scheme, host=host, server=server)
    assert (row is None) == (service is None)
    if row is not None and service is not None:
        assert row["service"].startswith(service)
        assert row["service"].partition(", zonal")[1] == service.partition(", zonal")[1]


def test_the_row_is_printed(s3: S3Place, run: Run) -> None:
    """If this fails, what the documents of a service promise is not told to those who ask about it."""
    named = Reply(status=403, headers=(("Server", "MinIO"),))
    with Wire(_endpoint(s3), WireRule(action=named, method="HEAD", path="^/$", times=None)) as wire:
        at = ("--storage-option", f"endpoint_url={wire.url}")
        assert "list after write: strong, on local drives" in run("doctor", s3.uri(), *at).out
        assert run("doctor", s3.uri(), *at, "--json").document["service"]["service"] == "MinIO"
    assert run("doctor", s3.uri(), "--json").document["service"] is None


def test_a_store_that_ignores_the_condition_fails_the_check(place: Place) -> None:
    """If this fails, a store on which saves overwrite one another is called good."""

    class Careless(WrappedStore):
        def put(self, key: str, views: Any, *, crc32c: int, if_absent: bool = False) -> None:
            super().put(key, views, crc32c=crc32c)

    report = examine(place.uri(), options=make_options(wrap_store=Careless))
    assert failed(report) - MOTO == {"create-if-absent"}
    assert not report.is_healthy
    assert "commit='unconditional'" in report["create-if-absent"].advice
    assert place.keys() == []


@pytest.mark.every_store
@pytest.mark.parametrize(
    ("operation", "check"),
    [
        ("create_multipart", {"parts", "abort", "unfinished uploads"}),
        ("complete_multipart", {"parts"}),
        ("abort_multipart", {"abort", "unfinished uploads", "left behind"}),
        ("list_uploads", {"unfinished uploads"}),
        ("head", {"head"}),
        ("read_into", {"range reads", "parts"}),
        ("delete", {"delete", "left behind"}),
        ("put", {"put"}),
    ],
)
def test_each_missing_permission_is_named(place: Place, operation: str, check: set[str]) -> None:
    """If this fails, a missing permission is not named, or hides others."""
    watched: list[FaultyStore] = []

    def lacking(store: Store) -> FaultyStore:
        def denied() -> StoreError:
            return AccessDeniedError("Grant it.", key="key", operation=operation)

        watched.append(FaultyStore(store))
        watched[-1].fail(operation, error=denied, times=999)
        return watched[-1]

    report = examine(place.uri(), options=make_options(wrap_store=lacking))
    assert failed(report) - MOTO == check
    # As permissions.md says: saves and loads work without these.
    assert report.is_healthy == (operation in {"abort_multipart", "delete", "head", "list_uploads"}), str(report)
    assert ("will fail" in str(report)) != report.is_healthy
    assert ("✗" in str(report)) != report.is_healthy
    assert all("Grant it" in one.advice for one in report.failures if one.name not in {*MOTO, "left behind"})
    keys = place.keys()
    assert not keys or operation in {"delete", "abort_multipart"} or place.root.startswith("gs://")
    assert all(WRITTEN_MARK in key for key in keys)


@pytest.mark.every_store
@pytest.mark.parametrize("operation", ["put", "upload_part"])
def test_ctrl_c_leaves_nothing(place: Place, operation: str) -> None:
    """If this fails, a report that was interrupted leaves objects and uploads that are paid for."""

    def interrupted(store: Store) -> FaultyStore:
        faulty = FaultyStore(store)
        faulty.fail(operation, error=KeyboardInterrupt, skip=1, after=True)
        return faulty

    with pytest.raises(KeyboardInterrupt):
        examine(place.uri(), options=make_options(wrap_store=interrupted))
    assert place.keys() == []
    assert place.num_unfinished_uploads() == 0


def test_no_secret_is_shown(s3: S3Place) -> None:
    """If this fails, a report that is sent to somebody holds credentials."""
    key, secret = "AKIDEXAMPLE123456789", "a-very-secret-secret"
    options = Options(storage_options={"access_key_id": key, "secret_access_key": secret})
    shown = str(examine(s3.uri(), options=options))
    assert secret not in shown
    assert key not in shown
    assert "…6789, from the storage options" in shown


def _endpoint(s3: S3Place) -> str:
    return str(s3.client.meta.endpoint_url)
