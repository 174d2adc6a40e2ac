"""Locations: what they mean, and what is refused in which words."""
# ruff: noqa: PTH109
# (what os makes of paths is what these tests compare with)

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudckpt.errors import InvalidURIError
from cloudckpt.uri import Location, is_remote_uri, is_valid_location, mangled_uri_scheme, parse_location, redact

ARN = "arn:aws:s3:us-west-2:123456789012:accesspoint/my-point"


@pytest.mark.parametrize(
    ("text", "scheme", "authority", "path"),
    [
        ("s3://bucket/run/step-1", "s3", "bucket", "run/step-1"),
        ("s3://bucket/run/step-1/", "s3", "bucket", "run/step-1"),
        ("s3://bucket", "s3", "bucket", ""),
        ("S3://bucket/Run", "s3", "bucket", "Run"),
        ("s3://my.bucket-1_x/a b/c+d%20/ü@v:1=2", "s3", "my.bucket-1_x", "a b/c+d%20/ü@v:1=2"),
        (f"s3://{ARN}/run/x", "s3", ARN, "run/x"),
        ("gcs://bucket/x", "gs", "bucket", "x"),
        ("memory://name/x/y", "memory", "name", "x/y"),
        ("file:///data/run", "file", "", "/data/run"),
        ("file:///a%20b?c#d", "file", "", "/a%20b?c#d"),
        ("file://localhost/data/run", "file", "", "/data/run"),
        ("webhdfs://[::1]/x", "webhdfs", "[::1]", "x"),
        ("/", "file", "", "/"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs", "container@account.dfs.core.windows.net", "x"),
        ("hdfs://namenode:8020/x", "hdfs", "namenode:8020", "x"),
        ("webhdfs://[::1]:9870/x", "webhdfs", "[::1]:9870", "x"),
    ],
)
def test_locations_are_parsed(text, scheme, authority, path):
    """Each form that the documentation names, and the parts it falls into."""
    assert parse_location(text) == Location(scheme=scheme, authority=authority, path=path)


def test_relative_paths_are_made_absolute_when_parsed(tmp_path, monkeypatch):
    """A save in the background must not follow a later chdir."""
    monkeypatch.chdir(tmp_path)
    location = parse_location("run/step-1")
    monkeypatch.chdir("/")
    assert location.uri == f"{os.path.realpath(tmp_path)}/run/step-1"
    monkeypatch.chdir(tmp_path)
    assert parse_location(Path("run")) == parse_location("run") == parse_location("./run/")
    assert parse_location(".").uri == os.getcwd()


def test_dots_mean_what_the_kernel_means(tmp_path):
    """Behind a symbolic link ``..`` is elsewhere than the text suggests; a save must land where ``ls`` would look."""
    (tmp_path / "deep" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/real")
    assert parse_location(f"{tmp_path}/link/../x").uri == f"{os.path.realpath(tmp_path)}/deep/x"
    assert parse_location("/..").uri == "/"


@pytest.mark.parametrize("name", ["best$acc", "$RECYCLE.BIN", "a$", "$1", "cost-$5"])
def test_a_name_may_have_a_dollar(name):
    """If this fails, a checkpoint that exists is hidden from `ls`, and nothing can open it."""
    assert parse_location(f"s3://bucket/run/{name}").uri == f"s3://bucket/run/{name}"


def test_the_home_directory_is_expanded(monkeypatch):
    """``~/checkpoints`` from a configuration file never means a directory whose name is a tilde."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_location("~/run").uri == "/home/someone/run"
    assert parse_location("~").uri == "/home/someone"
    assert parse_location("/data/~/x").uri == "/data/~/x"
    with pytest.raises(InvalidURIError, match="not known here"):
        parse_location("~nobody-of-that-name/run")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("s4://bucket/x", "unknown scheme 's4' (did you mean 's3://'?)"),
        ("s3//bucket://x", "does not begin with a scheme"),
        (" s3://bucket/x", "begins or ends with a blank"),
        ("s3://bucket/run /", "begins or ends with a blank"),
        ("run /.", "begins or ends with a blank"),
        ("$HOME/run", "a variable that no shell has replaced"),
        ("/data/run-${SLURM_JOB_ID}", "a variable that no shell has replaced"),
        ("gs://bucket/$USER/run", "a variable that no shell has replaced"),
        ("s3://$BUCKET/run", "a variable that no shell has replaced"),
        ("s3://", "bucket's name is missing"),
        ("s3://ab/x", "no bucket can have (an access point's ARN, or 3 to 63 letters, digits"),
        ("gs://Bucket/x", "no bucket can have (3 to 63, with dots 222 lowercase letters, digits"),
        ("s3://bucket//x", "empty segment"),
        ("s3://bucket/a/../b", "'.' and '..'"),
        ("s3://bucket/x?versionId=1", "'?' and '#'"),
        ("s3://bucket/a\nb", "control character"),
        ("s3://bucket/\udcff", "not valid Unicode"),
        ("s3://bucket/" + "k" * 901, "longer than 900 bytes"),
        ("simplecache::s3://bucket/x", "cache could serve a stale manifest"),
        ("async_wrapper://x", "is a layer over another file system"),
        ("my_store://bucket/x", "unknown scheme 'my_store'"),
        ("sftp://host:port/x", "not a port number"),
        ("file://data/run", "three slashes"),
        ("file:relative", "Pass the plain path, without 'file:'"),
        ("/work/file:/run", "os.path.realpath, which Lightning calls for a dirpath"),
        (
            "http://127.0.0.1:9000/bucket/run",
            "Pass 's3://bucket/run' with Options(storage_options={'endpoint_url': 'http:",
        ),
        ("https://my.bucket.s3.eu-west-1.amazonaws.com/run", "HTTP. Pass 's3://my.bucket/run'"),
        ("https://s3.amazonaws.com/bucket/run", "HTTP. Pass 's3://bucket/run'"),
        ("https://storage.googleapis.com/bucket/run", "HTTP. Pass 'gs://bucket/run'"),
        ("https://acct.blob.core.windows.net/box/run", "HTTP. Pass 'az://box/run' with Options(storage_options={'acc"),
        ("wasbs://box@acct.blob.core.windows.net/run", "unknown scheme 'wasbs' (did you mean 'abfss://'?)"),
        ("azure://box/run", "unknown scheme 'azure' (did you mean 'az://'?)"),
        ("https://eu-west-1.console.aws.amazon.com/s3/buckets/bucket", "is a page of the AWS console"),
        ("arn:aws:s3:::bucket/run", "is an ARN. Pass the URI, 's3://bucket/run'"),
        ("s3:/bucket/x", "pathlib.Path"),
        ("s3//bucket/x", "begins with 's3//'. Pass the URI, 's3://bucket/x', or './s3//…' for a path"),
        ("GS:bucket/x", "begins with 'GS:'. Pass the URI, 'gs://bucket/x'"),
        ("/work/s3:/bucket/x", "pathlib.Path"),
    ],
)
def test_invalid_uri_is_refused(text, words):
    """Each mistake has its own sentence; without one a job saves to the wrong place and finds out days later."""
    with pytest.raises(InvalidURIError) as caught:
        parse_location(text)
    assert words in str(caught.value)
    assert not is_valid_location(text)


def test_a_scheme_of_fsspec_with_an_underscore_is_accepted():
    """If this fails, ``arrow_hdfs://`` is taken for a chain of file systems, and nobody on HDFS can save."""
    assert parse_location("arrow_hdfs://namenode:8020/run/step-1").uri == "arrow_hdfs://namenode:8020/run/step-1"
    assert is_remote_uri("arrow_hdfs://namenode:8020/run/step-1")


@pytest.mark.parametrize(
    "mangled", [Path("s3://bucket/x"), Path("gs://bucket/x"), Path("s3://bucket/x").absolute(), "s3:/bucket/x"]
)
def test_a_uri_that_went_through_path_is_recognized(mangled):
    """A job would otherwise fill a local directory named ``s3:`` and lose it with the machine (Lightning #18786)."""
    with pytest.raises(InvalidURIError, match=r"after its scheme: write '(s3|gs)://bucket/x'\. pathlib\.Path removes"):
        parse_location(mangled)
    assert mangled_uri_scheme(mangled) in ("s3", "gs")
    assert not is_remote_uri(mangled)


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAID:hunter2secret@bucket/x",
        "ftp://user:hunter2@host/x",
        "s4://user:hunter2@bucket/x",
        "https://host/x?X-Amz-Signature=hunter2",
        "https://user:hunter2@host/bucket/x",
        "s3:/user:hunter2@bucket/x",
        "s3:user:hunter2@bucket/x",
        "s3://user:hunter2@bucket/\n",
        "sftp://user%3Ahunter2@host/x",
        "sftp://user%3ahunter2@host/x",
        "hdfs://user%3Ahunter2@host:8020/x",
        "s4://user%3Ahunter2/more@bucket/x",
    ],
)
def test_secrets_in_a_uri_are_refused_and_never_repeated(text):
    """URIs go into logs, manifests and exceptions that travel to every rank."""
    with pytest.raises(InvalidURIError) as caught:
        parse_location(text)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize("text", ["sftp://user@host/x", "sftp://user%40realm@host:22/x"])
def test_a_user_without_a_password_is_no_secret(text):
    """If this fails, nobody can say as whom to log in: only an encoded colon has a password behind it."""
    assert parse_location(text).uri == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://user%3Ahunter2@host/x", "sftp://***@host/x"),
        ("sftp://user%3ahun/ter2@host/x", "sftp://***@host/x"),
        ("s3://bucket/a%3Ab", "s3://bucket/a%3Ab"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_an_encoded_colon_before_an_at_hides_what_is_around_it(text, shown):
    """If this fails, a log shows a password whose colon is encoded, or hides a key that holds no secret."""
    assert redact(text) == shown


def test_children_are_joined_by_one_slash():
    """A catalogue opens what it lists; an extra slash would be another key."""
    assert parse_location("s3://bucket").child("step-1").uri == "s3://bucket/step-1"
    assert parse_location("s3://bucket/run/").child("step-1/x").uri == "s3://bucket/run/step-1/x"
    assert parse_location("/data").child("x").uri == "/data/x"
    assert parse_location("/").child("x").uri == "/x"
    assert parse_location("s3://bucket/run/step-1").name == "step-1"
    assert parse_location("s3://bucket").name == ""
    for bad in ("", "..", "a/../b", "/a", "a/", "a//b"):
        with pytest.raises(InvalidURIError, match="cannot be a name under s3://bucket"):
            parse_location("s3://bucket").child(bad)


@given(st.text())
def test_every_text_is_parsed_or_refused(text):
    """Nothing but InvalidURIError comes out, whatever goes in."""
    try:
        location = parse_location(text)
    except InvalidURIError:
        assert not is_valid_location(text)
    else:
        assert is_valid_location(text)
        assert parse_location(location.uri) == location
