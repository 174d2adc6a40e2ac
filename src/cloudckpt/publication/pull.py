"""`pull`: brings a model, in place, or a folder to a version that a `Publisher` has published."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from cloudckpt._display import transferred, with_short_repr
from cloudckpt._messages import quote_names
from cloudckpt._workers import start_in_thread
from cloudckpt.api import load
from cloudckpt.convert.exports import MAX_SHARD_BYTES
from cloudckpt.dcp.live.objects import Model
from cloudckpt.dcp.ranks.rank_calls import RankCalls
from cloudckpt.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    CloudckptError,
    CorruptCheckpointError,
    InvalidOptionError,
)
from cloudckpt.format.codec import decode, encode
from cloudckpt.io.boxes import Box, intersect
from cloudckpt.options import Options, require_options
from cloudckpt.pipeline.context import Context
from cloudckpt.pipeline.reader import CheckpointReader
from cloudckpt.pipeline.wanted_items import TensorBytes
from cloudckpt.publication.deltas import apply_delta, parse_delta_name
from cloudckpt.publication.folders import ModelFolder, read_pieces
from cloudckpt.publication.pieces import (
    HeldModel,
    HeldPiece,
    HeldPieceSum,
    check_form,
    combine_sums,
    find_overlapping,
    find_pieces,
    in_threads,
    sum_pieces,
    without_aliases,
)
from cloudckpt.publication.versions import (
    PublishedTensor,
    Version,
    Versions,
    check_version,
    hash_state,
    overtaken_error,
    parse_version,
)
from cloudckpt.tensors.tensor_bytes import as_carrier, bytes_view, synchronize_streams, writable
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")
_DOING = "pulling from"
_FIRST_POLL_S, _POLL_GROWTH, _MAX_POLL_S = 0.25, 1.5, 5.0


@with_short_repr
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """Report of one pull on one rank. `pull` returns it."""

    uri: str
    """URI of the version."""
    version: int
    """Number of the version that the model or the folder now has."""
    num_versions_read: int
    """Number of versions that were read; 0 if the model or the folder had the version already."""
    starts_at_anchor: bool
    """True if whole tensors were read, False if differences alone."""
    num_bytes_read: int
    """Bytes of tensors and differences that this rank read."""
    pull_s: float
    """Seconds of the call, without the wait for the version."""


def pull(
    root: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    *,
    model: Model | None = None,
    version: int | Literal["latest"] = "latest",
    newer_than: int | None = None,
    timeout_s: float = 0.0,
    strip_prefix: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config_from: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    options: Options | None = None,
    target_options: Options | None = None,
) -> PullReport:
    """Bring a model, in place, or a folder to a version that a `Publisher` has published.

    A model that holds the version before reads one difference, and one that holds an older version since the anchor the
    differences since then. Any other model reads the anchor first. The bytes of the model decide, by checksums of whole
    tensors, before anything is written. The shards may be cut in any way. At the end, the checksums of the whole state
    are compared. After an error, the model may hold anything. The next pull finds that out.

    A folder gets the tensors as safetensors files with an index, in Hugging Face's layout. One process pulls into it,
    and holds all tensors in memory. The index is replaced last, so that a reader finds the files of one version, also
    after an error. The second pull after the one that wrote the files of a version removes them.

    Args:
        root: The folder of the versions.
        folder: URI of the folder to write, instead of `model`. It may hold other files, but no other weights.
        model: The model to fill: a ``torch.nn.Module``, or a dict of them. Its tensors have the names, shapes and
            dtypes of the publisher's.
        version: Number of the version, or ``"latest"``.
        newer_than: Take only a version with a higher number.
        timeout_s: Seconds to wait for such a version. 0 looks once.
        strip_prefix: First part to remove from the names in a folder.
        max_shard_bytes: Largest size of a file in a folder, unless one tensor is larger.
        config_from: URI of a folder whose files that hold no weights are copied along, as by `export_checkpoint`.
        process_group: Group of the ranks; None for all.
        no_dist: Pull in this process alone.
        options: Options of the reads.
        target_options: Options for the folder.

    Returns:
        This rank's report.

    Raises:
        CheckpointNotFoundError: There is no such version, also after `timeout_s`.
        CheckpointChangedError: Retention has removed what the pull needs. Pull again: it starts at the anchor.
        StateDictMismatchError: The model has other names, shapes or dtypes. Nothing was changed.
        CheckpointExistsError: The folder has weights of another program.
        UnsupportedValueError: Safetensors files have no such dtype.
        CorruptCheckpointError: The version is damaged.
        InvalidOptionError: An argument cannot be used.

    Example::

        cloudckpt.Publisher("s3://bucket/policy").publish(model=model, version=100)
        weights = cloudckpt.pull("s3://bucket/policy", model=model)
        print(weights.version)

    """
    version, newer_than = _check_arguments(folder, model, version, newer_than, timeout_s)
    versions = Versions(parse_location(root), require_options(options))
    held_folder = None
    if folder is not None:
        held_folder = ModelFolder(
            versions.location.uri,
            folder,
            strip_prefix=strip_prefix,
            config_from=config_from,
            max_shard_bytes=max_shard_bytes,
            options=versions.options,
            target_options=target_options,
        )
    calls = RankCalls(
        process_group,
        no_dist=no_dist or folder is not None,
        root=versions.location.uri,
        timeout_s=versions.options.timeout_s,
        doing=_DOING,
    )
    found = _broadcast(calls, lambda: _wait_for(versions, version, newer_than, timeout_s))
    if not found:  # which is no failure of a rank
        which = "version" if newer_than is None else f"version above {newer_than}"
        which = which if version == "latest" else f"version {version}, or retention has removed it"
        since, uri = f"after {timeout_s:g} s, " if timeout_s else "", versions.location.uri
        raise CheckpointNotFoundError(f"{since}{uri} has no {which}{versions.advise_root()}", uri=uri)
    (target,) = found
    if held_folder is not None:
        return _pull_folder(calls, versions, held_folder, target)
    assert model is not None  # noqa: S101  # `_check_arguments` has checked it
    begun_s, uri, published = time.monotonic(), target.location.uri, target.publication.tensors
    base, guess = target.publication.base, None
    if base is not None and base.version == newer_than:
        guess = _Delta(target, versions.options, rank=calls.rank)  # the model most likely holds its base
    held, state, has_values = _describe(calls, model, published, uri=uri, guess=guess)
    check_form(held, published, uri=uri)
    held_state = "" if has_values else hash_state(held)  # Python objects have no checksums
    chain = _broadcast(calls, lambda: versions.find_chain(target, held=held_state))

    def read_whole(anchor: Version) -> int:
        nonlocal state
        options = versions.options
        report = load(anchor.location.uri, model=model, process_group=process_group, no_dist=no_dist, options=options)
        if anchor != chain[-1]:  # the state from before may be a copy
            _, state, _ = _describe(calls, model, published, uri=uri)
        return report.num_bytes_read

    with _explaining_removal(target):
        num_bytes, starts_at_anchor = _read_chain(
            calls,
            chain,
            held=held_state,
            options=versions.options,
            pieces=lambda: without_aliases(state.pieces),
            guess=guess,
            read_whole=read_whole,
        )
        if len(chain) > starts_at_anchor:
            calls.all_gather("load_state_dict", state.put_back)
    if chain:
        held, *_ = _describe(calls, model, published, uri=uri)
    if different := [name for name, tensor in published.items() if held.get(name) != tensor]:
        raise CorruptCheckpointError(
            f"after the pull of {uri}, {quote_names(different)} are not what was published: the versions are damaged, "
            "or the model was changed meanwhile. Do not use it. Pull again, and the pull starts at the anchor",
            uri=uri,
        )
    return _report(target, chain, begun_s, num_bytes=num_bytes, starts_at_anchor=starts_at_anchor)


def _check_arguments(
    folder: object, model: object, version: int | Literal["latest"], newer_than: int | None, timeout_s: float
) -> tuple[int | Literal["latest"], int | None]:
    """Return the two numbers as plain ones. Raises `InvalidOptionError`."""
    if (folder is None) == (model is None):
        raise InvalidOptionError("pull takes a model or a folder to fill, and one of the two")
    if version != "latest" and newer_than is not None:
        raise InvalidOptionError("newer_than needs version='latest', not the number of a version")
    if not timeout_s >= 0:
        raise InvalidOptionError(f"timeout_s must be a number of seconds of at least 0, not {timeout_s!r}")
    return (
        "latest" if version == "latest" else check_version(version),
        None if newer_than is None else check_version(newer_than, name="newer_than"),
    )


def _pull_folder(calls: RankCalls, versions: Versions, folder: ModelFolder, target: Version) -> PullReport:
    begun_s, uri, published = time.monotonic(), target.location.uri, target.publication.tensors
    chain = versions.find_chain(target, held=folder.state_hash)
    num_bytes, starts_at_anchor = 0, False
    if chain:
        pieces, held_state = folder.new_pieces(target), folder.state_hash
        if chain[0].publication.is_based_on(held_state) and not folder.read(pieces):
            held_state = ""
            chain = versions.find_chain(target, held=held_state)

        def read_whole(anchor: Version) -> int:
            reader = CheckpointReader(Context(anchor.location, versions.options, rank=0), anchor.manifest)
            read_pieces(reader, pieces, {name: name for name in published})
            return sum(piece.tensor.nbytes for piece in pieces)

        with _explaining_removal(target):
            num_bytes, starts_at_anchor = _read_chain(
                calls,
                chain,
                held=held_state,
                options=versions.options,
                pieces=lambda: pieces,
                read_whole=read_whole,
            )
        held = combine_sums([sum_pieces(pieces)], uri=uri)
        if different := [name for name, tensor in published.items() if held[name] != tensor]:
            raise CorruptCheckpointError(
                f"{quote_names(different)} of {uri} are not what was published, so nothing was written: the versions "
                "are damaged. Pull another version",
                uri=uri,
            )
        folder.write(pieces, target)
    return _report(target, chain, begun_s, num_bytes=num_bytes, starts_at_anchor=starts_at_anchor)


def _read_chain(
    calls: RankCalls,
    chain: Sequence[Version],
    *,
    held: str,
    options: Options,
    pieces: Callable[[], Sequence[HeldPiece]],
    read_whole: Callable[[Version], int],
    guess: _Delta | None = None,
) -> tuple[int, bool]:
    """Read versions into a model of the state `held`. Return the bytes, and True if the first was read whole.

    `guess` is the difference of the last one, which may be read already.
    """
    starts_at_anchor = bool(chain) and not chain[0].publication.is_based_on(held)
    num_bytes = 0
    for number, version in enumerate(chain):
        if number or not starts_at_anchor:
            delta = guess if guess and version is chain[-1] else _Delta(version, options, rank=calls.rank)
            read, apply = functools.partial(delta.read, pieces()), functools.partial(delta.apply, pieces())
            damage = [found for found in calls.all_gather("read", read) if found]  # no rank has written yet
            if not damage:
                calls.all_gather("apply", apply)
                num_bytes += delta.num_bytes
                continue
            _log.warning("the pull of %s reads the whole tensors: %s", version.location.uri, damage[0])
            starts_at_anchor = True
        num_bytes += read_whole(version)
    return num_bytes, starts_at_anchor


def _report(
    target: Version, chain: Sequence[Version], begun_s: float, *, num_bytes: int, starts_at_anchor: bool
) -> PullReport:
    uri, pull_s = target.location.uri, time.monotonic() - begun_s
    _log.info("pulled %s%s", uri, transferred(num_bytes, pull_s))
    return PullReport(
        uri=uri,
        version=target.publication.version,
        num_versions_read=len(chain),
        starts_at_anchor=starts_at_anchor,
        num_bytes_read=num_bytes,
        pull_s=pull_s,
    )


@contextlib.contextmanager
def _explaining_removal(target: Version) -> Iterator[None]:
    try:
        yield
    except (CheckpointNotFoundError, CheckpointChangedError) as error:
        raise overtaken_error(target, why=error) from error


def _describe(
    calls: RankCalls, model: Model, published: Mapping[str, PublishedTensor], *, uri: str, guess: _Delta | None = None
) -> tuple[dict[str, PublishedTensor], HeldModel, bool]:
    """Return the tensors that the ranks hold, the state on this rank, and if it has Python objects on any rank.

    Meanwhile, read the difference that is likely to be needed.
    """
    found: list[HeldModel] = []

    def describe() -> tuple[list[HeldPieceSum], bool]:
        found.append(find_pieces(model, rank=calls.rank, uri=uri, published=published))
        pieces = found[0].pieces
        reading = (
            None if guess is None else start_in_thread(lambda: guess.try_to_read(pieces), name="cloudckpt-publication")
        )
        sums = sum_pieces(pieces)
        if reading is not None:
            reading.result()
        return sums, found[0].has_values

    states = calls.all_gather("compare", describe)
    # Replicas that differ, as after a pull that was killed, are the state of no version.
    held = combine_sums([sums for sums, _ in states], uri=uri, allow_unequal=True)
    return held, found[0], any(has_values for _, has_values in states)


def _broadcast(calls: RankCalls, find: Callable[[], Sequence[Version]]) -> list[Version]:
    """Return what `find` returns on rank 0, on all ranks."""
    sent = calls.broadcast("find", lambda: [(version.location, encode(version.manifest)) for version in find()])
    return [parse_version(decode(document, uri=location.uri), location) for location, document in sent]


def _wait_for(
    versions: Versions, number: int | Literal["latest"], newer_than: int | None, timeout_s: float
) -> list[Version]:
    """Return the version to pull; nothing if there is none after `timeout_s`."""
    deadline_s, wait_s = time.monotonic() + timeout_s, _FIRST_POLL_S
    above = -1 if newer_than is None else newer_than
    while True:
        target = versions.find_newest(above=above) if number == "latest" else versions.read(number)
        if target is not None:
            return [target]
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return []
        time.sleep(min(wait_s, left_s))
        wait_s = min(wait_s * _POLL_GROWTH, _MAX_POLL_S)


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    with writable([target]):
        as_carrier(target).copy_(as_carrier(source))


class _Delta:
    """The differences of one version on one rank: first all are read, then applied."""

    def __init__(self, version: Version, options: Options, *, rank: int) -> None:
        self._version, self._options, self._rank = version, options, rank
        self._uri = version.location.uri
        self._is_anchor = version.publication.is_anchor
        self._is_read = False
        self._changes: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        """The differences that this rank needs, by tensor."""
        self.num_bytes = 0

    def try_to_read(self, pieces: Iterable[HeldPiece]) -> None:
        """Read the differences, if it can be done. `read` tries again, and tells why not."""
        with contextlib.suppress(CloudckptError):
            self.read(pieces)

    def read(self, pieces: Iterable[HeldPiece]) -> str:
        """Read the differences. Return the damage if they are damaged, and the version has the whole tensors, too."""
        if self._is_read:
            return ""
        self._changes, self.num_bytes = {}, 0
        boxes: dict[str, list[Box]] = {}
        for piece in pieces:
            boxes.setdefault(piece.name, []).append(piece.box)
        wanted = []
        for entry, stored in self._version.manifest.tensors.items():
            name, box = parse_delta_name(entry)
            if any(intersect(box, own) for own in boxes.get(name, ())):
                buffer = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
                self._changes.setdefault(name, []).append((box, buffer))
                wanted.append(TensorBytes(name=entry, begin=0, end=buffer.nbytes, buffer=buffer))
                self.num_bytes += buffer.nbytes
        try:
            # A reader that has failed looks at nothing again.
            context = Context(self._version.location, self._options, rank=self._rank)
            CheckpointReader(context, self._version.manifest).read_bytes(wanted)
        except CorruptCheckpointError as error:
            if not self._is_anchor:
                raise
            return str(error)
        self._is_read = True
        return ""

    def apply(self, pieces: Sequence[HeldPiece]) -> None:
        shared = find_overlapping(pieces)  # a difference would change an element once for each of them
        copied = [piece._replace(tensor=piece.tensor.clone(memory_format=torch.contiguous_format)) for piece in shared]
        synchronize_streams(piece.tensor for piece in copied)  # other threads write to them
        keys = {piece.key for piece in shared}
        in_threads([*(piece for piece in pieces if piece.key not in keys), *copied], self._apply_to)
        for piece, changed in zip(shared, copied, strict=True):
            _copy_into(piece.tensor, changed.tensor)

    def _apply_to(self, piece: HeldPiece) -> None:
        with writable([piece.tensor]):
            for box, buffer in self._changes.get(piece.name, ()):
                apply_delta(
                    bytes_view(buffer), box, piece.tensor, piece.box, piece.dtype, name=piece.name, uri=self._uri
                )
        synchronize_streams([piece.tensor])  # those of this thread
