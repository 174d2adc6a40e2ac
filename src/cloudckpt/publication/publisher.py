"""`Publisher`: saves each version of a model as the difference to the version before, and now and then whole."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from cloudckpt._display import transferred, with_short_repr
from cloudckpt._workers import logging_failures, start_in_thread
from cloudckpt.api import save
from cloudckpt.dcp.live.objects import Model
from cloudckpt.dcp.ranks.rank_calls import RankCalls, num_ranks_of
from cloudckpt.errors import CheckpointExistsError, InvalidOptionError
from cloudckpt.format.model import PUBLICATION_KEY
from cloudckpt.options import Options, require_options
from cloudckpt.publication.deltas import delta_name, encode
from cloudckpt.publication.pieces import (
    HeldPiece,
    HeldPieceKey,
    HeldPieceSum,
    combine_sums,
    find_pieces,
    in_threads,
    resolve_model,
    sum_pieces,
    without_aliases,
)
from cloudckpt.publication.versions import (
    FORMAT,
    Base,
    Publication,
    Succession,
    VersionRetention,
    Versions,
    check_version,
)
from cloudckpt.report import SaveReport
from cloudckpt.tensors.extensions import import_zstandard
from cloudckpt.uri import parse_location

_log = logging.getLogger("cloudckpt")
_MAX_DELTA_SHARE = 0.5
"""A difference of a larger share of the whole is not sent: the version is an anchor."""


@with_short_repr
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport(SaveReport):
    """Report of the save of one version on one rank. `Publisher.publish` returns it."""

    version: int
    """Number of the version."""
    is_anchor: bool
    """True if the version has the whole tensors, False if it has differences alone."""


class _Sent(NamedTuple):
    """The version that this publisher has committed last."""

    publication: Publication
    attempt: str
    num_deltas: int
    """The number of versions since the anchor."""


class _RankState(NamedTuple):
    """The message of a rank to the others before a version."""

    sums: list[HeldPieceSum]
    num_bytes: int
    changed_bytes: int | None
    """Bytes of the differences to the version before; None without a copy of it."""
    may_copy: bool
    """True if the rank may have such a copy."""
    anchor_every: int
    follows: int
    """The newest version, on rank 0."""


class Publisher:
    """Publishes versions of a model under `root`, for readers that `pull` them.

    Each version is a checkpoint, committed as by `save`. It has the difference to the version before, which takes a few
    percent of the bytes while training changes few bits. An anchor has the whole tensors, too. Each rank sends its own
    shard. The first version of a publisher, and the one after a failure, have the whole tensors alone.

    Args:
        root: The folder of the versions. It has no other checkpoints.
        anchor_every: Every n-th version is an anchor. With 1, no copy of the shard is kept to compare with.
        keep_chains: How many anchors to keep, the newest, with the versions up to the next one; None keeps all.
        pinned: Returns True for a version that stays, with all versions from its anchor to the next, and else False.
            After any other answer, nothing is removed, and the log tells why.
        max_copy_bytes: The most host memory for the copy of a rank's shard. If a rank needs more, all versions are
            anchors. None for no limit.
        process_group: Group of the ranks; None for all.
        no_dist: Publish from this process alone.
        options: Options of the saves.

    Raises:
        InvalidOptionError: An argument cannot be used.
        MissingDependencyError: The package zstandard is missing, and `anchor_every` is not 1.

    Example::

        publisher = cloudckpt.Publisher("s3://bucket/policy", anchor_every=20)
        publisher.publish(model=model, version=100)

    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        anchor_every: int = 20,
        keep_chains: int | None = 2,
        pinned: Callable[[int], bool] = lambda _version: False,
        max_copy_bytes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        options: Options | None = None,
    ) -> None:
        limits = {"anchor_every": anchor_every, "keep_chains": keep_chains, "max_copy_bytes": max_copy_bytes}
        for name, value in limits.items():
            if not (isinstance(value, int) and value >= 1) and (value is not None or name == "anchor_every"):
                raise InvalidOptionError(f"{name} must be an integer of at least 1, not {value!r}")
        if not callable(pinned):
            raise InvalidOptionError(f"pinned must be a function that takes a version's number, not {pinned!r}")
        if anchor_every > 1:
            import_zstandard("Publisher(anchor_every=…) above 1")
        self._anchor_every, self._max_copy_bytes = anchor_every, max_copy_bytes
        self._process_group, self._no_dist = process_group, no_dist
        self._options = dataclasses.replace(require_options(options), unchanged="send")
        if PUBLICATION_KEY in self._options.metadata:
            raise InvalidOptionError(f"the entry {PUBLICATION_KEY!r} of Options(metadata=…) belongs to the publisher")
        self._versions = Versions(parse_location(root), self._options)
        self._retention = VersionRetention(self._versions, keep_chains, pinned)
        self._sent: _Sent | None = None
        self._id = secrets.token_hex(8)
        self._succession = Succession(self._versions, self._id)
        self._copy: dict[HeldPieceKey, torch.Tensor] = {}
        self._copied: object = None
        """The `_form_of` the pieces in the copy; None without a copy."""

    def __repr__(self) -> str:
        sent = None if self._sent is None else self._sent.publication
        state = "nothing published" if sent is None else f"version {sent.version}, anchor {sent.anchor}"
        return f"<Publisher of {self._versions.location.uri}: {state}>"

    @property
    def copy_bytes(self) -> int:
        """Host memory of the copy of this rank's shard, with which the next version is compared."""
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in self._copy.values()}.values())

    def publish(self, *, model: Model, version: int) -> PublishReport:
        """Publish a version from all ranks, and return once it is committed.

        Readers see the version before until then. Afterwards, superseded versions are removed.

        Args:
            model: A ``torch.nn.Module``, or a dict of them, as `save` takes it.
            version: Number of the version, such as the step of training. It must be higher than all before.

        Returns:
            This rank's report. It tells an anchor from a difference. ``num_bytes_unchanged`` are the bytes that a
            difference saves; 0 for an anchor.

        Raises:
            CheckpointExistsError: The version, or a higher one, is published already; or another publisher has taken
                over. Then this one can publish nothing more.
            CommitUnknownError: The outcome is unknown. If the version is there, it is whole.
            UnsupportedValueError: Replicas of a tensor differ between ranks, or a tensor cannot be saved.
            InvalidOptionError: `version` is no number.
            RankLostError: A rank died, or did not come.

        Example::

            publisher = cloudckpt.Publisher("s3://bucket/policy")
            report = publisher.publish(model=model, version=100)
            print(report.num_bytes, "bytes sent")

        """
        try:
            return self._publish(model, check_version(version))
        except BaseException:
            self._copy, self._copied = {}, None  # so that the next version is an anchor
            raise

    def _publish(self, model: Model, version: int) -> PublishReport:
        begun_s, sent = time.monotonic(), self._sent
        uri = self._versions.place_of(version).uri
        group, no_dist = self._process_group, self._no_dist
        calls = RankCalls(group, no_dist=no_dist, root=uri, timeout_s=self._options.timeout_s, doing="publishing")
        pieces: list[HeldPiece] = []
        changes: dict[str, torch.Tensor] = {}

        def find_newest() -> int:
            return self._succession.find_newest(None if sent is None else sent.publication, version)

        def describe() -> _RankState:
            # The store answers while the bytes are compared.
            newest = start_in_thread(find_newest, name="cloudckpt-look") if calls.rank == 0 else None
            held = find_pieces(model, rank=calls.rank, uri=uri)
            pieces.extend(held.pieces)
            num_bytes = sum(piece.tensor.nbytes for piece in pieces)
            is_small = num_bytes <= (self._max_copy_bytes or num_bytes)
            changed_bytes = None
            if sent is not None and self._copied == _form_of(pieces):
                changes.update(self._encode(pieces))
                changed_bytes = sum(change.nbytes for change in changes.values())
            return _RankState(
                sum_pieces(pieces),
                num_bytes,
                changed_bytes,
                may_copy=self._anchor_every > 1 and is_small and not held.has_values,
                anchor_every=self._anchor_every,
                follows=-1 if newest is None else newest.result(),
            )

        states = calls.all_gather("compare", describe)
        if len(given := {state.anchor_every for state in states}) > 1:
            raise InvalidOptionError(f"anchor_every must be the same on all ranks, not one of {sorted(given)}")
        tensors = combine_sums([state.sums for state in states], uri=uri)
        self._renew_copy(states, pieces)
        base = None
        if sent is not None and _are_small(states):
            base = Base(sent.publication.version, sent.attempt, sent.publication.state_hash)
        entries: dict[str, Any] = {} if base is None else {**changes}
        num_deltas = 0 if sent is None or base is None else (sent.num_deltas + 1) % self._anchor_every
        anchor = version if sent is None or not num_deltas else sent.publication.anchor
        publication = Publication(
            format=FORMAT,
            version=version,
            publisher=self._id,
            follows=states[0].follows,
            anchor=anchor,
            base=base,
            tensors=tensors,
        )
        if publication.is_anchor:
            entries |= resolve_model(model, rank=calls.rank, num_ranks=num_ranks_of(group, no_dist=no_dist))
        described = {**self._options.metadata, PUBLICATION_KEY: msgspec.to_builtins(publication)}
        options = dataclasses.replace(self._options, metadata=described)
        try:
            saved = save({"version": version, **entries}, uri, process_group=group, no_dist=no_dist, options=options)
        except CheckpointExistsError:
            self._succession.is_overtaken = True  # another publisher had the number first
            raise
        assert saved.report is not None  # noqa: S101  # no process of torch's has saved
        self._succession.own.add(version)
        calls.broadcast("find", lambda: self._succession.find_newest(publication))
        self._sent = _Sent(publication, saved.report.attempt, num_deltas)
        if calls.rank == 0:
            with logging_failures("superseded versions under %s were not removed", self._versions.location.uri):
                self._retention.run_after(publication)
        fields = dataclasses.asdict(saved.report)
        if not publication.is_anchor:
            fields["num_bytes_unchanged"] = max(0, states[calls.rank].num_bytes - saved.report.num_bytes)
        _log.info("published %s%s", uri, transferred(saved.report.num_bytes, time.monotonic() - begun_s))
        return PublishReport(**fields, version=version, is_anchor=publication.is_anchor)

    def _renew_copy(self, states: list[_RankState], pieces: list[HeldPiece]) -> None:
        """Make the copy that of `pieces`, unless there are no differences, or it was compared with them."""
        if not all(state.may_copy for state in states):
            self._copy, self._copied = {}, None
        elif self._copied != _form_of(pieces):
            self._copy = {}  # first, so that there are never two
            self._copy, self._copied = _copies_of(pieces), _form_of(pieces)

    def _encode(self, pieces: Iterable[HeldPiece]) -> dict[str, torch.Tensor]:
        """Return the differences of pieces to their copies, by entry. The save stores those of replicas once."""
        changes: dict[object, torch.Tensor | None] = {}

        def compare(piece: HeldPiece) -> None:
            changes[piece.memory_key] = encode(piece.bytes(), self._copy[piece.key])

        in_threads(without_aliases(pieces), compare)
        by_piece = ((piece, changes[piece.memory_key]) for piece in pieces)
        return {delta_name(piece.name, piece.box): change for piece, change in by_piece if change is not None}


def _are_small(states: Sequence[_RankState]) -> bool:
    """Return True if all ranks have differences, and these are worth sending."""
    changed_bytes = [state.changed_bytes for state in states if state.changed_bytes is not None]
    most_bytes = _MAX_DELTA_SHARE * sum(state.num_bytes for state in states)
    return len(changed_bytes) == len(states) and sum(changed_bytes) <= most_bytes


def _form_of(pieces: Iterable[HeldPiece]) -> dict[HeldPieceKey, object]:
    """Return what must not change for differences: the dtype of each piece, and which pieces are tied."""
    first_keys: dict[object, HeldPieceKey] = {}
    return {piece.key: (piece.dtype, first_keys.setdefault(piece.memory_key, piece.key)) for piece in pieces}


def _copies_of(pieces: Iterable[HeldPiece]) -> dict[HeldPieceKey, torch.Tensor]:
    """Copy the bytes of `pieces`; those of tied tensors once."""
    copies: dict[object, torch.Tensor] = {}
    for piece in pieces:
        if piece.memory_key not in copies:
            copies[piece.memory_key] = torch.tensor(piece.bytes(), dtype=torch.uint8, device="cpu")
    return {piece.key: copies[piece.memory_key] for piece in pieces}
