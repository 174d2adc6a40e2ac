"""Parse the URIs and paths of checkpoints.

`pathlib.Path` turns ``s3://bucket`` into ``s3:/bucket``: such a mangled path is recognized and refused. A URI is taken
literally, as S3 and fsspec do: ``%20`` is three characters. No message repeats a password or a signature.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cloudckpt._messages import did_you_mean, find_near
from cloudckpt.errors import InvalidURIError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-_]*)://")  # fsspec has schemes with "_", which RFC 3986 has not
_ANY_SCHEME = re.compile(r"([^/:]*)(:/{1,2}|)(.*)", re.DOTALL)
_COLON = re.compile(r":|%3a", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"\$[{(]|(?:^|/)\$[A-Za-z_]\w*(?:/|$)")  # a name such as best$acc is one
# Layers over another file system: a cache may serve stale manifests, an archive cannot take objects one by one.
_LAYERS = frozenset(
    {
        "async_wrapper",
        "asynclocal",
        "asyncwrapper",
        "blockcache",
        "cached",
        "data",
        "dir",
        "filecache",
        "generic",
        "libarchive",
        "reference",
        "simplecache",
        "tar",
        "zip",
    }
)
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-points-naming.html, and the Outposts form of it
_ARN = re.compile(
    r"arn:aws[a-z\-]*:s3[a-z\-]*:[a-z0-9\-]*:[0-9]{12}:(?:outpost[:/][A-Za-z0-9\-]+[:/])?accesspoint[:/][A-Za-z0-9.\-]+"
)
_S3_BUCKET_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._\-]{{1,61}}[A-Za-z0-9]|{_ARN.pattern}")
_GCS_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._\-]{1,220}[a-z0-9]")
_ARN_OF_BUCKET = re.compile(r"arn:aws[a-z\-]*:s3:::(?P<bucket>[^/]+)(?P<path>/.*)?")
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html, and the pages of the console
_AMAZON_HOST = re.compile(r"(?:(?P<bucket>.+)\.)?s3[a-z0-9.\-]*\.amazonaws\.com(?:\.cn)?(?::[0-9]+)?", re.IGNORECASE)
_AZURE_HOST = re.compile(r"(?P<account>[a-z0-9]+)\.(?:blob|dfs)\.core\.[a-z.]+")
_OTHER_SCHEMES = {"azure": "az", "wasb": "abfs", "wasbs": "abfss"}
"""Schemes of other programs for Azure, and what fsspec calls them."""
STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})(?:-again-([1-9][0-9]{0,17}))?")
"""The names of the folders in which a manager keeps the steps of a run."""
# S3 and GCS take keys of 1024 bytes; what is left is for the longest key inside a checkpoint.
_MAX_PREFIX_BYTES = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A kind of store that cloudckpt has a class for, as one row of `SERVICES`."""

    store: str
    """The module and the class, which has ``at(location, options)``."""
    aliases: Sequence[str] = ()
    """Other schemes that mean the same."""
    bucket_name: re.Pattern[str] | None = None
    """The form of the names of buckets; None if a URI of the service has no bucket."""
    bucket_form: str = ""
    """The same in words, for messages."""
    takes_options: bool = True
    """True if a client with `Options.storage_options` reaches the service."""
    bucket_attribute: str = ""
    """The attribute of OpenTelemetry for the bucket's name; empty if there is none."""


SERVICES = {
    "s3": Service(
        store="cloudckpt.stores.s3:S3Store",
        aliases=("s3a",),
        bucket_name=_S3_BUCKET_NAME,
        bucket_form="an access point's ARN, or 3 to 63 letters, digits, '.', '_' or '-'",
        bucket_attribute="aws.s3.bucket",
    ),
    "gs": Service(
        store="cloudckpt.stores.gcs:GCSStore",
        aliases=("gcs",),
        bucket_name=_GCS_BUCKET_NAME,
        bucket_form="3 to 63, with dots 222 lowercase letters, digits, '.', '_' or '-'",
    ),
    "file": Service(store="cloudckpt.stores.local:LocalStore", aliases=("local",), takes_options=False),
    "memory": Service(store="cloudckpt.stores.memory:MemoryStore", takes_options=False),
}
"""The services by their schemes. fsspec's file systems serve every other scheme."""
_FSSPEC = Service(store="cloudckpt.stores.fsspec_store:FsspecStore")
_ALIASES = {alias: scheme for scheme, service in SERVICES.items() for alias in service.aliases}
_BUCKETS = [name for name in (*SERVICES, *_ALIASES) if SERVICES[_ALIASES.get(name, name)].bucket_name is not None]
_MISTYPED_SCHEME = re.compile(rf"({'|'.join(_BUCKETS)})(?://|:(?!/))", re.IGNORECASE)
"""A scheme of buckets without its colon or slashes. Taken for a path, it would let a job fill a local folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place for a checkpoint, or for a folder of them.

    For files `authority` is empty and `path` absolute; elsewhere `path` is a key prefix with no slash at its ends.
    """

    scheme: str
    authority: str
    """The bucket; the name of a memory store; the host of another file system."""
    path: str

    @property
    def uri(self) -> str:
        """The normal form of this location: an absolute path for files, a URI otherwise."""
        if self.scheme == "file":
            return self.path
        return f"{self.scheme}://{self.authority}" + (f"/{self.path}" if self.path else "")

    @property
    def local_path(self) -> str | None:
        """The absolute path on this machine; None for a place elsewhere."""
        return self.path if self.scheme == "file" else None

    @property
    def is_hub(self) -> bool:
        """True for a place on Hugging Face's hub, which publishes the SHA-256 of its large files."""
        return self.scheme == "hf"

    @property
    def service(self) -> Service:
        """The service that has the place."""
        return SERVICES.get(self.scheme, _FSSPEC)

    @property
    def parent(self) -> Location:
        """The folder that holds this location; itself for a whole bucket or the root of the files."""
        folder = self.path.rpartition("/")[0]
        return Location(
            scheme=self.scheme, authority=self.authority, path=folder or ("" if self.local_path is None else "/")
        )

    def is_of_kind(self, other: Location) -> bool:
        """Return True if stores of one kind hold both, which the same storage options may reach."""
        return self.scheme == other.scheme

    @property
    def name(self) -> str:
        """The last segment; empty for a bucket as a whole."""
        return self.path.rpartition("/")[2]

    def child(self, relative: str) -> Location:
        """Return the location `relative` (one segment or several) below this one."""
        problem = _segments_problem(relative) if relative else "it is empty"
        if problem:
            raise InvalidURIError(f"{relative!r} cannot be a name under {self.uri}: {problem}.")
        path = f"{self.path.rstrip('/')}/{relative}" if self.path else relative
        return Location(scheme=self.scheme, authority=self.authority, path=path)

    def __str__(self) -> str:
        return self.uri


def parse_location(location: str | os.PathLike[str] | Location) -> Location:
    """Parse a URI or a path. A relative path is made absolute, so that a later ``chdir`` changes nothing.

    A leading ``~`` is the home directory. Raises `InvalidURIError` if `location` cannot name a checkpoint.
    """
    if isinstance(location, Location):
        return location
    try:
        text = os.fspath(location)
    except TypeError as error:
        hint = " Pass its uri." if hasattr(location, "uri") else ""
        raise InvalidURIError(
            f"A checkpoint's location is a str or a path, not {type(location).__name__}.{hint}"
        ) from error
    text = os.fsdecode(text)
    if not text.strip():
        raise InvalidURIError(
            "The checkpoint's location is empty. Pass a URI such as 's3://bucket/run/step-1', or a path."
        )
    if _CONTROL.search(text):
        raise InvalidURIError(f"The location {redact(text)!r} contains a control character.")
    _refuse_blank(text, location=text)
    if _VARIABLE.search(text):
        raise InvalidURIError(
            f"The location {redact(text)!r} has a '$' before a name, as a variable that no shell has replaced: "
            "none does between single quotes. Pass its value, in Python by os.path.expandvars."
        )
    match = _SCHEME.match(text)
    if match is None and "://" in text:
        raise InvalidURIError(
            f"{redact(text)!r} does not begin with a scheme such as 's3://'. Chained fsspec URIs "
            f"('simplecache::s3://…') are not accepted either, because a cache could serve a stale manifest."
        )
    parsed = _parse_uri(text, scheme=match[1].lower(), rest=text[match.end() :]) if match else _parse_path(text)
    _refuse_blank(parsed.path, location=text)
    return parsed


def folder_and_name(location: Location) -> tuple[Location, str]:
    """Split the location of a file into its folder and its name."""
    if not location.name:
        raise InvalidURIError(f"{location.uri} names no file: add a name such as model.pt")
    return location.parent, location.name


def _refuse_blank(name: str, *, location: str) -> None:
    if name != name.strip():
        raise InvalidURIError(f"The location {redact(location)!r} begins or ends with a blank: remove it.")


def is_remote_uri(location: object) -> bool:
    """Return True for a str of the form ``scheme://…`` with a known scheme."""
    match = _SCHEME.match(location) if isinstance(location, str) else None
    return match is not None and match[1].lower() in known_schemes()


def is_valid_location(location: object) -> bool:
    """Return True if `parse_location` accepts `location`. The store and its package need not exist."""
    try:
        parse_location(location)  # type: ignore[arg-type]  # the function is for values of any type
    except InvalidURIError:
        return False
    return True


def mangled_uri_scheme(location: object) -> str | None:
    """Return the scheme if `location` is a URI of which `pathlib.Path` has removed a slash, or that lacks a colon."""
    if not isinstance(location, (str, os.PathLike)):
        return None
    text = os.fsdecode(os.fspath(location))
    if "://" in text:
        return None
    if (slip := _MISTYPED_SCHEME.match(text)) is not None:
        return slip[1].lower()
    for segment in text.split("/"):
        if segment.endswith(":") and segment[:-1].lower() in known_schemes():
            return segment[:-1].lower()
    return None


@functools.cache
def known_schemes() -> frozenset[str]:
    """Return all schemes that can name a checkpoint: cloudckpt's own and fsspec's, installed or not."""
    import fsspec  # noqa: PLC0415  # plain paths and S3 do not need it

    protocols: list[str] = fsspec.available_protocols()
    return frozenset([*SERVICES, *_ALIASES, *protocols]) - _LAYERS


def _parse_uri(text: str, *, scheme: str, rest: str) -> Location:
    shown = redact(text)
    if scheme not in known_schemes():
        raise InvalidURIError(_unknown_scheme_message(shown, scheme))
    if scheme in ("http", "https"):
        raise InvalidURIError(f"{shown!r} {_http_problem(scheme, rest.partition('?')[0])}")
    scheme = _ALIASES.get(scheme, scheme)
    if scheme == "file":
        return _parse_file_uri(shown, rest)
    if "::" in rest and "://" in rest:
        raise InvalidURIError(f"{shown!r} chains several file systems; pass the URI of the one that holds the objects.")
    authority, path = _split_authority(scheme, rest)
    user, at_sign, _ = authority.rpartition("@")
    if at_sign and (scheme in SERVICES or _COLON.search(user)):
        raise InvalidURIError(
            f"{shown!r} carries credentials. URIs end up in logs: leave them out, and configure the client or pass "
            f"storage options."
        )
    problem = _authority_problem(scheme, authority) or _path_problem(scheme, path)
    if problem:
        raise InvalidURIError(f"{shown!r} cannot name a checkpoint: {problem}.")
    return Location(scheme=scheme, authority=authority, path=path.removesuffix("/"))


def _http_problem(scheme: str, rest: str) -> str:
    """Say which URI to pass in place of a URL: over HTTP, folders cannot be listed, and commits cannot be made."""
    host, _, path = rest.rpartition("@")[2].partition("/")
    if "console.aws.amazon" in host.lower():
        return "is a page of the AWS console. Pass the URI, 's3://bucket/prefix'."
    amazon = _AMAZON_HOST.fullmatch(host)
    key = "/".join(filter(None, [amazon and amazon["bucket"], path])) or "bucket/prefix"
    words = "is a URL, and a checkpoint can be neither listed nor committed over plain HTTP. Pass"
    if amazon is not None or host == "storage.googleapis.com":
        return f"{words} '{'s3' if amazon else 'gs'}://{key}'."
    if (azure := _AZURE_HOST.fullmatch(host)) is not None:
        return (
            f"{words} 'az://{path or 'container/prefix'}' with Options(storage_options={{'account_name': "
            f"'{azure['account']}'}}), or in a shell --storage-option account_name={azure['account']}."
        )
    endpoint = f"{scheme}://{host or 'host'}"
    return (
        f"{words} 's3://{key}' with Options(storage_options={{'endpoint_url': '{endpoint}'}}), or in a shell "
        f"--storage-option endpoint_url={endpoint}."
    )


def _parse_file_uri(shown: str, rest: str) -> Location:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidURIError(
            f"{shown!r} has {host!r} where the host belongs. A file URI has three slashes, 'file:///absolute/path'; "
            f"write a relative path plainly, without 'file://'."
        )
    return _parse_path("/" + path)


def _parse_path(text: str) -> Location:
    if (arn := _ARN_OF_BUCKET.fullmatch(text)) is not None:
        raise InvalidURIError(f"{text!r} is an ARN. Pass the URI, 's3://{arn['bucket']}{arn['path'] or ''}'.")
    if (slip := _MISTYPED_SCHEME.match(text)) is not None:
        uri = redact(f"{slip[1].lower()}://{text[slip.end() :]}")
        raise InvalidURIError(
            f"A location begins with {slip[0]!r}. Pass the URI, {uri!r}, or './{slip[0]}…' for a path."
        )
    scheme = mangled_uri_scheme(text)
    if scheme or text.startswith("file:"):
        if scheme in (None, "file"):
            problem = (
                "is no file URI: pathlib.Path, or os.path.realpath, which Lightning calls for a dirpath, may have "
                "removed its slashes. Pass the plain path, without 'file:'."
            )
        else:
            uri = redact(re.sub(rf".*?\b{scheme}:/*", f"{scheme}://", text, count=1, flags=re.IGNORECASE))
            problem = (
                f"has one slash after its scheme: write {uri!r}. pathlib.Path removes a slash: pass a URI as a str"
            )
        raise InvalidURIError(f"{redact(text)!r} {problem}")
    if text.startswith("~"):
        expanded = os.path.expanduser(text)  # noqa: PTH111  # Path would also rewrite the rest
        if expanded == text:
            raise InvalidURIError(
                f"{text!r} begins with a home directory that is not known here; write the absolute path."
            )
        text = expanded
    try:
        segments = os.path.join(os.getcwd(), text).split("/")  # noqa: PTH109, PTH118
    except FileNotFoundError as error:
        raise InvalidURIError(
            f"The path {text!r} is relative, and the current directory was removed. Pass an absolute path."
        ) from error
    segments = [segment for segment in segments if segment not in ("", ".")]
    if ".." in segments:
        # Behind a symbolic link ".." is not the directory one to the left, so ask the kernel.
        end = len(segments) - segments[::-1].index("..")
        return Location(
            scheme="file",
            authority="",
            path="/".join([os.path.realpath("/" + "/".join(segments[:end])).rstrip("/"), *segments[end:]]) or "/",
        )
    return Location(scheme="file", authority="", path="/" + "/".join(segments))


def _split_authority(scheme: str, rest: str) -> tuple[str, str]:
    arn = _ARN.match(rest) if scheme == "s3" else None
    if arn and rest[arn.end() : arn.end() + 1] in ("", "/"):
        return arn[0], rest[arn.end() + 1 :]
    authority, _, path = rest.partition("/")
    return authority, path


def _authority_problem(scheme: str, authority: str) -> str | None:
    bucket_name = SERVICES.get(scheme, _FSSPEC).bucket_name
    if bucket_name is not None:
        if not authority:
            return f"the bucket's name is missing ('{scheme}://bucket/prefix')"
        if not bucket_name.fullmatch(authority):
            form = SERVICES[scheme].bucket_form
            return f"its bucket has a name that no bucket can have ({form}, with a letter or digit at both ends)"
    elif scheme == "memory" and not authority:
        return "the store's name is missing ('memory://name/prefix')"
    if any(character in authority for character in "?#\\"):
        return "its host contains '?', '#' or '\\'"
    _, colon, port = authority.rpartition("@")[2].rpartition(":")
    if scheme not in SERVICES and colon and not authority.endswith("]") and not port.isdigit():
        return "what follows ':' in its host is not a port number"
    return None


def _path_problem(scheme: str, path: str) -> str | None:
    trimmed = path.removesuffix("/")
    if "?" in path or "#" in path:
        # Legal in keys, but half of all tools cut a URI there: two checkpoints would become one.
        return "'?' and '#' are not accepted, because many tools take what follows as a query or fragment"
    has_bucket = SERVICES.get(scheme, _FSSPEC).bucket_name is not None
    if has_bucket and len(trimmed.encode("utf-8", "surrogatepass")) > _MAX_PREFIX_BYTES:
        return f"its prefix is longer than {_MAX_PREFIX_BYTES} bytes, so that the keys under it would be too long"
    return _segments_problem(trimmed) if trimmed or path else None


def _segments_problem(path: str) -> str | None:
    try:
        path.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    segments = path.split("/")
    if "" in segments:
        return "it has an empty segment (two slashes in a row)"
    if "." in segments or ".." in segments:
        return "'.' and '..' mean nothing in an object's key"
    return None


def _unknown_scheme_message(shown: str, scheme: str) -> str:
    if scheme in _LAYERS:
        return (
            f"{shown!r}: {scheme!r} is a layer over another file system, which could serve stale bytes; "
            f"pass the URI of the file system below it."
        )
    near = _OTHER_SCHEMES.get(scheme) or find_near(scheme, SERVICES, cutoff=0.5)
    near = near or find_near(scheme, sorted(known_schemes()), cutoff=0.75)
    hint = did_you_mean(near and f"{near}://")
    return (
        f"{shown!r} has the unknown scheme {scheme!r}{hint}. Known are {', '.join(SERVICES)}, plain paths, "
        f"and the protocols of fsspec."
    )


def redact(location: object) -> str:
    """Return the text of a location without credentials (``user:password@``) and query (``?X-Amz-Signature=…``)."""
    text = os.fsdecode(location) if isinstance(location, (str, bytes, os.PathLike)) else str(location)
    text, question, _ = text.partition("?")
    scheme, slashes, rest = _ANY_SCHEME.match(text).groups()  # type: ignore[union-attr]  # it matches every text
    # A password may contain slashes, so credentials end at the last "@". A user without a password has no slash.
    user, at_sign, after = rest.rpartition("@")
    if slashes and at_sign and (_COLON.search(user) or "/" not in user):
        rest = f"***@{after}"
    return f"{scheme}{slashes}{rest}" + ("?…" if question else "")


def store_attributes(uri: str) -> dict[str, str]:
    """Return the attributes of telemetry that name the kind of store of `uri` (its normal form), and its bucket."""
    scheme, separator, rest = uri.partition("://")
    scheme = scheme if separator else "file"
    bucket_attribute = SERVICES.get(scheme, _FSSPEC).bucket_attribute
    bucket = {bucket_attribute: _split_authority(scheme, rest)[0]} if bucket_attribute else {}
    return {"cloudckpt.store": scheme, **bucket}
