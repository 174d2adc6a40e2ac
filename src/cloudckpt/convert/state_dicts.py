"""Choose and rename entries, and load a state dict without a model."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloudckpt._messages import did_you_mean, find_near_entry, quote_names
from cloudckpt.api import load
from cloudckpt.dcp.load_planner import WholePlanner
from cloudckpt.dcp.renaming import common_prefixes
from cloudckpt.dcp.storage_reader import ObjectStoreReader
from cloudckpt.errors import InvalidOptionError, UnsupportedValueError
from cloudckpt.format.nesting import flatten
from cloudckpt.inspect.description import matches
from cloudckpt.options import Options
from cloudckpt.report import LoadReport
from cloudckpt.tensors.tensor_bytes import training_mode
from cloudckpt.uri import Location, parse_location

_log = logging.getLogger("cloudckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The entries to take from a source, all or by patterns of names, and their new names."""

    uri: str
    include: tuple[str, ...] = ()
    strip_prefix: str = ""
    add_prefix: str = ""
    leaves_out: Callable[[str], object] | None = None
    """Takes the first part of a name, and returns a true value if the entry is left out."""

    def __post_init__(self) -> None:
        if self.add_prefix and "" in self.add_prefix.removesuffix(".").split("."):
            raise InvalidOptionError(f"add_prefix must be a name such as 'model', not {self.add_prefix!r}")

    def choose_names(self, fqns: Iterable[str]) -> dict[str, str]:
        """Return the new name of each entry to take. The prefixes are whole parts of dotted names.

        Raises `InvalidOptionError` for a pattern or a prefix that fits no entry, and `UnsupportedValueError` if two
        entries would have one name.
        """
        known = list(fqns)
        require_matches("include", self.include, known, uri=self.uri)
        selected = [fqn for fqn in known if self.takes(fqn)]
        stripped, added = _with_dot(self.strip_prefix), _with_dot(self.add_prefix)
        if stripped and not any(fqn.startswith(stripped) for fqn in selected):
            near = find_near_entry(stripped.rstrip("."), selected)
            raise InvalidOptionError(
                f"no entry that is taken of {self.uri} has a name with the prefix {stripped!r}{did_you_mean(near)}. "
                f"The names are {quote_names(sorted(selected))}"
            )
        if stripped and (unfit := [fqn for fqn in selected if not fqn.startswith(stripped)]):
            _log.warning(
                "the prefix %r does not fit %s of %s, which keep their names. To leave them out, include %r alone",
                stripped.rstrip("."),
                quote_names(common_prefixes(unfit, selected)),
                self.uri,
                stripped.rstrip("."),
            )
        names: dict[str, str] = {}
        old_names: dict[str, str] = {}
        for fqn in selected:
            name = added + fqn.removeprefix(stripped)
            if not name and fqn:
                raise UnsupportedValueError(
                    f"nothing is left of the name {fqn!r} of {self.uri} without {stripped!r}", uri=self.uri
                )
            if name in old_names:
                raise UnsupportedValueError(
                    f"{old_names[name]!r} and {fqn!r} of {self.uri} would both be called {name!r}. Choose among them "
                    "with include",
                    uri=self.uri,
                )
            old_names[name] = fqn
            names[fqn] = name
        return names

    def takes(self, fqn: str) -> bool:
        """Return True if an entry is to be taken."""
        if self.leaves_out is not None and self.leaves_out(fqn.partition(".")[0]):
            return False
        return not self.include or matches(fqn, self.include)

    def rename_entries(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Flatten a state dict, and rename its entries. If no names change, return the state dict unchanged."""
        if self == Selection(uri=self.uri):
            return state_dict
        flat = flatten_entries(state_dict, uri=self.uri, takes_apart=False)
        return {name: flat[fqn] for fqn, name in self.choose_names(flat).items()}


def _with_dot(prefix: str) -> str:
    return f"{prefix.rstrip('.')}." if prefix else ""


def require_matches(option: str, patterns: Iterable[str], known: Sequence[str], *, uri: str) -> None:
    """Raise `InvalidOptionError` for a pattern that fits none of the `known` entries."""
    for pattern in patterns:
        if not any(matches(fqn, [pattern]) for fqn in known):
            name = pattern.rstrip("*").rstrip(".")
            near = find_near_entry(name, known)
            hint = did_you_mean(near)
            whole = near.removesuffix(".model")
            beside = [fqn for fqn in known if matches(fqn, [whole]) and not matches(fqn, [near])]
            if name == "model" and near != whole and beside:  # one of transformers has its own "model", beside the head
                hint = f" (did you mean {whole!r}, or {near!r} without {quote_names(common_prefixes(beside, known))}?)"
            raise InvalidOptionError(
                f"no entry of {uri} matches {option}={pattern!r}{hint}. It has {quote_names(sorted(known))}"
            )


def parse_patterns(include: str | Sequence[str]) -> tuple[str, ...]:
    """Return one or several patterns as a tuple."""
    patterns = (include,) if isinstance(include, str) else tuple(include)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise InvalidOptionError(f"include must be patterns such as 'model.*', not {include!r}")
    return patterns


@training_mode()
def load_whole(
    source: Location, options: Options, selection: Selection, *, allow_pickle: bool
) -> tuple[dict[str, Any], LoadReport]:
    """Load the state dict saved at `source`: nested as it was, or flat if names are changed. Also return the report.

    Raises what `load` raises.
    """
    included = dataclasses.replace(selection, strip_prefix="", add_prefix="")
    planner = WholePlanner(included.choose_names, included.takes, uri=selection.uri)
    reader = ObjectStoreReader(source.uri, options=options, allow_pickle=allow_pickle, _is_part=True, _via="")
    report = load({}, storage_reader=reader, planner=planner, no_dist=True)
    return dataclasses.replace(selection, include=(), leaves_out=None).rename_entries(planner.nest()), report


def flatten_entries(state_dict: Mapping[str, Any], *, uri: str, takes_apart: bool = True) -> dict[str, Any]:
    """Return the entries by the names that a save gives. Raises `UnsupportedValueError` for an entry without a name."""
    try:
        return flatten(state_dict, uri=uri, takes_apart=takes_apart).entries
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{uri} holds no state dict that can be saved: {error}", uri=uri) from error


def read(
    uri: str | os.PathLike[str],
    *,
    include: str | Sequence[str] = (),
    allow_pickle: bool = False,
    options: Options | None = None,
) -> dict[str, Any]:
    """Read a checkpoint, or a part of it, without a state dict to fill.

    Only the chosen entries are read, and every byte of them is checked. One process reads them, without a process
    group.

    Args:
        uri: The checkpoint.
        include: Names of entries, or patterns as for files. ``"model"`` and ``"model.*"`` take all that is below
            ``model``. Empty for all entries.
        allow_pickle: See `cloudckpt.load`.
        options: See `cloudckpt.load`.

    Returns:
        The state dict, nested as it was saved. Tensors are whole, and on the CPU.

    Raises:
        CheckpointException: See `cloudckpt.load`.
        InvalidOptionError: A pattern fits no entry.

    Example::

        state_dict = cloudckpt.read("s3://bucket/run/step-100", include="model.head.*")
        print(state_dict["model"]["head.weight"].shape)

    """
    location = parse_location(uri)
    selection = Selection(uri=location.uri, include=parse_patterns(include))
    return load_whole(location, options or Options(), selection, allow_pickle=allow_pickle)[0]
