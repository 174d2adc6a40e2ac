"""Whatever stands in the way of a save is found, is told with what to do, and nothing is left of the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.places import Place, S3Place
from tests.wrapped import FaultyStore, WrappedStore

from cloudckpt import Options
from cloudckpt.doctor import Check, Examination, around, examine
from cloudckpt.errors import AccessDeniedError, InvalidOptionError, StoreError
from cloudckpt.stores._body import crc32c_of
from cloudckpt.stores.base import Store
from cloudckpt.testing.wire import S3_ACCESS_DENIED, Reply, Rule, StallAnswer, Wire
from cloudckpt.testing.wrapping import Call

WRITTEN_MARK = ".cloudckpt-probe-"
MOTO = {"checksums", "lifecycle"}
"""What is not well with moto: it takes wrong checksums, and the bucket has no rule."""


def failed(examination: Examination) -> set[str]:
    return {check.name for check in examination.failures}


def through(wire: Wire, **more: Any) -> Options:
    return Options(storage_options={"endpoint_url": wire.url}, **more)


def test_a_place_in_order_is_found_so_and_left_as_it_was(place: Place) -> None:
    """If this fails, a good store is called ill, or an examination leaves objects that are paid for."""
    seen: list[Check] = []
    examination = examine(place.uri(), on_check=seen.append)
    assert examination.is_healthy, str(examination)
    assert failed(examination) <= MOTO
    assert tuple(seen) == examination.checks
    for name in (
        "list",
        "put",
        "get",
        "range reads",
        "head",
        "delete",
        "listings",
        "create-if-absent",
        "parts",
        "abort",
    ):
        assert examination[name].outcome == "passed", str(examination)
    assert "p99" in examination["latency"].found
    assert "with 8" in examination["throughput"].found
    assert place.keys() == []
    assert place.num_unfinished_uploads() == 0


def test_a_folder_that_was_not_there_is_not_there_afterwards(tmp_path: Path) -> None:
    """If this fails, an examination leaves empty folders, or removes some that were there before."""
    (tmp_path / "old").mkdir()
    assert examine(tmp_path / "old" / "new" / "run", measure=False).is_healthy
    assert [*tmp_path.rglob("*")] == [tmp_path / "old"]
    assert examine(tmp_path / "old", measure=False).is_healthy
    assert [*tmp_path.rglob("*")] == [tmp_path / "old"]


def test_a_reader_writes_nothing(place: Place) -> None:
    """If this fails, whoever only loads is told that writing is denied."""
    place.write("checkpoint/manifest.json", b"{}")
    calls: list[str] = []

    class Watched(WrappedStore):
        def around(self, call: Call, action: Callable[[], Any]) -> Any:
            calls.append(call.operation)
            return action()

    examination = examine(place.uri(), read_only=True, options=Options(wrap_store=Watched))
    assert examination.is_healthy
    assert examination["get"].outcome == "passed"
    assert set(calls) <= {"list", "read_into"}
    assert "put" not in {check.name for check in examination.checks}


def test_a_bucket_that_is_not_there(s3: S3Place) -> None:
    """If this fails, a mistyped bucket is called a permission or a network that is missing."""
    examination = examine("s3://no-such-bucket/run")
    assert failed(examination) == {"bucket"}
    assert not examination.is_healthy
    assert "Create it, or correct its name" in examination["bucket"].advice
    assert examination["put"].outcome == "skipped"


def test_an_endpoint_that_is_down(s3: S3Place) -> None:
    """If this fails, a wrong endpoint_url is taken for one fault of many, or is waited for."""
    with Wire("http://127.0.0.1:1") as wire:
        url = wire.url
    examination = examine(s3.uri(), options=Options(storage_options={"endpoint_url": url}))
    assert failed(examination) == {"endpoint"}
    assert "endpoint_url" in examination["endpoint"].advice
    assert all(check.outcome == "skipped" for check in examination.checks if check.name != "endpoint")


def test_an_endpoint_that_hangs(s3: S3Place) -> None:
    """If this fails, an endpoint that takes connections and says nothing holds the examination for ever."""
    with Wire(_endpoint(s3), Rule(action=StallAnswer(), times=None)) as wire:
        examination = examine(s3.uri(), options=through(wire, timeout_s=1.5))
    assert failed(examination) == {"endpoint"}
    assert "in time" in examination["endpoint"].advice


def test_an_unknown_key(s3: S3Place) -> None:
    """If this fails, wrong credentials are not told from missing permissions."""
    body = b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown</Message></Error>"
    refuse = Reply(status=403, body=body)
    with Wire(_endpoint(s3), Rule(action=refuse, times=None)) as wire:
        examination = examine(s3.uri(), options=through(wire))
    assert failed(examination) == {"credentials"}
    assert "Check keys, profile and region" in examination["credentials"].advice


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_clock_that_is_off(s3: S3Place, monkeypatch: pytest.MonkeyPatch, off_s: float) -> None:
    """If this fails, refusals because of a wrong clock are looked for in the credentials."""
    right = around.now_s
    monkeypatch.setattr(around, "now_s", lambda: right() + off_s)
    examination = examine(s3.uri(), measure=False)
    assert failed(examination) == MOTO | {"clock"}
    assert "ahead of" in examination["clock"].found if off_s > 0 else "behind" in examination["clock"].found
    assert "NTP" in examination["clock"].advice


def test_a_store_that_ignores_the_condition(place: Place) -> None:
    """If this fails, a store on which saves overwrite one another is called good."""

    class Careless(WrappedStore):
        def put(self, key: str, views: Any, *, crc32c: int, if_absent: bool = False) -> None:
            super().put(key, views, crc32c=crc32c)

    examination = examine(place.uri(), measure=False, options=Options(wrap_store=Careless))
    assert failed(examination) - MOTO == {"create-if-absent"}
    assert not examination.is_healthy
    assert "commit='unconditional'" in examination["create-if-absent"].advice
    assert place.keys() == []


def test_a_store_that_refuses_and_replaces_all_the_same(place: Place) -> None:
    """If this fails, a store that answers 412 and overwrites is called good."""

    class Lying(WrappedStore):
        def put(self, key: str, views: Any, *, crc32c: int, if_absent: bool = False) -> None:
            try:
                super().put(key, views, crc32c=crc32c, if_absent=if_absent)
            finally:
                if if_absent:
                    super().put(key, views, crc32c=crc32c)

    examination = examine(place.uri(), measure=False, options=Options(wrap_store=Lying))
    assert failed(examination) - MOTO == {"create-if-absent"}


def test_wrong_checksums_that_are_taken(place: Place) -> None:
    """If this fails, a store that keeps damaged bytes is called strict, or one that does is called unusable."""

    class Trusting(WrappedStore):
        def put(self, key: str, views: Any, *, crc32c: int, if_absent: bool = False) -> None:
            super().put(key, views, crc32c=crc32c_of(views), if_absent=if_absent)

    examination = examine(place.uri(), measure=False, options=Options(wrap_store=Trusting))
    assert failed(examination) - MOTO == {"checksums"} - MOTO
    assert examination["checksums"].outcome == "failed"
    assert examination.is_healthy


@pytest.mark.parametrize(
    ("operation", "check"),
    [
        ("create_multipart", {"parts", "abort", "unfinished uploads"}),
        ("complete_multipart", {"parts"}),
        ("abort_multipart", {"abort", "unfinished uploads", "left behind"}),
        ("list_uploads", {"unfinished uploads"}),
        ("head", {"head"}),
        ("read_into", {"range reads", "parts"}),
        ("delete", {"delete", "listings", "left behind"}),
        ("put", {"put"}),
    ],
)
def test_each_permission_that_is_missing(place: Place, operation: str, check: set[str]) -> None:
    """If this fails, a missing permission is not named, or hides others."""
    watched: list[FaultyStore] = []

    def lacking(store: Store) -> FaultyStore:
        def denied() -> StoreError:
            return AccessDeniedError("Grant it.", key="key", operation=operation)

        watched.append(FaultyStore(store))
        watched[-1].fail(operation, error=denied, times=999)
        return watched[-1]

    examination = examine(place.uri(), measure=False, options=Options(wrap_store=lacking))
    assert failed(examination) - MOTO == check
    assert all("Grant it." in one.advice for one in examination.failures if one.name not in {*MOTO, "left behind"})
    keys = place.keys()
    assert not keys or operation in {"delete", "abort_multipart"} or place.root.startswith("gs://")
    assert all(WRITTEN_MARK in key for key in keys)


def test_a_list_that_is_denied_keeps_the_rest_from_nothing(s3: S3Place) -> None:
    """If this fails, a role that may not list is told that the bucket is missing, or that it may do nothing."""
    with Wire(_endpoint(s3), Rule(action=S3_ACCESS_DENIED, path="list-type", times=None)) as wire:
        examination = examine(s3.uri(), measure=False, options=through(wire))
    assert failed(examination) == MOTO | {"list", "listings"}
    assert "s3:ListBucket" in examination["list"].advice
    assert examination["bucket"].outcome == "skipped"
    assert examination["put"].outcome == "passed"


@pytest.mark.parametrize("operation", ["put", "upload_part", "read_into"])
def test_ctrl_c_leaves_nothing(place: Place, operation: str) -> None:
    """If this fails, an examination that was interrupted leaves objects and uploads that are paid for."""

    def interrupted(store: Store) -> FaultyStore:
        faulty = FaultyStore(store)
        faulty.fail(operation, error=KeyboardInterrupt, skip=1, after=True)
        return faulty

    with pytest.raises(KeyboardInterrupt):
        examine(place.uri(), options=Options(wrap_store=interrupted))
    assert place.keys() == []
    assert place.num_unfinished_uploads() == 0


def test_nothing_begins_after_the_deadline(place: Place) -> None:
    """If this fails, an examination of a slow store has no end."""
    examination = examine(place.uri(), deadline_s=1e-9)
    assert {check.outcome for check in examination.checks} <= {"skipped", "passed"}
    assert examination["put"].found == "not asked: 1e-09 s were over"
    with pytest.raises(InvalidOptionError):
        examine(place.uri(), deadline_s=float("nan"))


def test_a_lifecycle_rule_is_seen(s3: S3Place) -> None:
    """If this fails, users with a rule are told to add one."""
    rule = {
        "ID": "abort",
        "Status": "Enabled",
        "Filter": {},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
    }
    s3.client.put_bucket_lifecycle_configuration(Bucket=s3.bucket, LifecycleConfiguration={"Rules": [rule]})
    s3.client.put_bucket_versioning(Bucket=s3.bucket, VersioningConfiguration={"Status": "Enabled"})
    examination = examine(s3.uri(), measure=False)
    assert examination["lifecycle"].found == "unfinished uploads are aborted after 3 days"
    assert examination["versioning"].found.startswith("on")


def test_another_region_is_told(s3: S3Place) -> None:
    """If this fails, requests that are signed for another region than the bucket's go unnoticed."""
    examination = examine(s3.uri(), measure=False, options=Options(storage_options={"region": "eu-west-1"}))
    assert "region" in failed(examination)
    assert "region=us-east-1" in examination["region"].advice


def test_no_secret_is_shown(s3: S3Place) -> None:
    """If this fails, a report that is sent to somebody holds credentials."""
    key, secret = "AKIDEXAMPLE123456789", "a-very-secret-secret"
    options = Options(storage_options={"access_key_id": key, "secret_access_key": secret})
    shown = str(examine(s3.uri(), measure=False, options=options))
    assert secret not in shown
    assert key not in shown
    assert "…6789, from storage_options" in shown


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """If this fails, a path with a file in its way is called good."""
    (tmp_path / "file").write_text("")
    examination = examine(tmp_path / "file" / "run", measure=False)
    assert not examination.is_healthy
    assert failed(examination)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, saves fail for want of space that nobody was told about."""
    usage = dataclasses.make_dataclass("Usage", ["free"])(free=5 * 1024 * 1024)
    monkeypatch.setattr("cloudckpt.doctor.around.shutil.disk_usage", lambda _: usage)
    examination = examine(tmp_path, measure=False)
    assert failed(examination) == {"free space"}
    assert examination["free space"].found == "5 MiB are free"


def _endpoint(s3: S3Place) -> str:
    return str(s3.client.meta.endpoint_url)
