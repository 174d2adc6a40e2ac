"""A checkpoint under the names that a load asks for: `rename` maps names of the checkpoint to these."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt.errors import InvalidOptionError, StateDictMismatchError, quote_names
from cloudckpt.format.model import Manifest, StoredTuple
from cloudckpt.format.nesting import Path, name_path, path_from_json, path_to_json

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]
_T = TypeVar("_T")
_MAX_COMPARED, _MAX_SAMPLE = 5000, 50
_ABSENT: Any = object()
_FUNCTION = "<function>"
_ADVICE = "rename maps names in the checkpoint to those of what is loaded"


class Renaming:
    """The new names of the entries of one checkpoint.

    An entry without a new name is hidden from the load. So is one that a mapping does not rename and that has one of
    its new prefixes: below a new prefix stands only what was renamed to it.

    Raises `StateDictMismatchError` for a part of `rename` that fits no entry, and for two entries with one new name.
    """

    def __init__(self, rename: Rename, names: Collection[str], *, uri: str) -> None:
        self._function = rename if callable(rename) else None
        pairs = [] if callable(rename) else [(old.rstrip("."), new.rstrip(".")) for old, new in rename.items()]
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
        self._uri = uri
        self.old_names: dict[str, str] = {}
        """The name in the checkpoint of each entry that a load sees, by its new one."""
        self.given: dict[str, set[str]] = {}
        """The new names that each part of `rename` has given, by its text."""
        for old in names:
            new, part = self._find(old)
            if part:
                self.given.setdefault(part, set()).update([] if new is None else [new])
            if new is not None and (other := self.old_names.setdefault(new, old)) != old:
                raise StateDictMismatchError(
                    f"rename gives both {other!r} and {old!r} of {uri} the name {new!r}. Leave one of them out: let a "
                    "function return None for it",
                    uri=uri,
                )
        expected = [_FUNCTION] if self._function is not None else [f"{{{old!r}: {new!r}}}" for old, new in self._pairs]
        if unused := [part for part in expected if part not in self.given]:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
            raise StateDictMismatchError(
                f"rename={', '.join(unused)} changes no name of {uri}, which has {quote_names(tops)}. {_ADVICE}",
                uri=uri,
            )

    def _find(self, old: str) -> tuple[str | None, str]:
        """Return the new name, and the part of `rename` that gives it; "" for none."""
        if self._function is not None:
            new = self._function(old)
            if new is not None and not isinstance(new, str):
                raise InvalidOptionError(f"rename must return a str or None, and it returned {new!r} for {old!r}")
            return new, "" if new == old else _FUNCTION
        for prefix, other in self._pairs:
            if is_below(old, prefix):
                rest = old[len(prefix) :].removeprefix(".") if prefix else old
                return ".".join(filter(None, (other, rest))), f"{{{prefix!r}: {other!r}}}"
        return (None if any(is_below(old, other) for _, other in self._pairs) else old), ""

    def new_name(self, old: str) -> str | None:
        """Return the name under which a load sees an entry; None if it does not."""
        return self._find(old)[0]

    def by_new_name(self, entries: Mapping[str, _T]) -> dict[str, _T]:
        """Return entries, such as all tensors, by their new names."""
        return {new: entries[old] for old in entries if (new := self.new_name(old)) is not None}

    def apply(self, manifest: Manifest) -> Manifest:
        """Return `manifest` with the new names."""
        wrappers = self.by_new_name(manifest.wrappers)
        for new, wrapper in wrappers.items():
            if missing := [part for part in wrapper.tensors if f"{new}.{part}" not in self.old_names]:
                raise StateDictMismatchError(
                    f"rename takes {new!r} of {self._uri} apart, which is a {wrapper.kind}: it leaves out or renames "
                    f"its {quote_names(missing)}. Rename all of it alike",
                    uri=self._uri,
                )
        typed = {name: path_from_json(path) for name, path in (manifest.typed_nesting or {}).items()}
        nesting = None if manifest.nesting is None else self._new_paths(manifest.nesting)
        return msgspec.structs.replace(
            manifest,
            tensors=self.by_new_name(manifest.tensors),
            values=self.by_new_name(manifest.values),
            wrappers=wrappers,
            nesting=nesting,
            typed_nesting={name: path_to_json(path) for name, path in self._new_paths(typed).items()},
            empty_mappings=[path for one in manifest.empty_mappings for path in self._new_path_of_container(one)],
            tuples=[
                StoredTuple(path, one.kind) for one in manifest.tuples for path in self._new_path_of_container(one.path)
            ],
        )

    def apply_to_torchs(self, metadata: Metadata) -> Metadata:
        """Return the metadata of a checkpoint of torch's own writer with the new names."""
        return dataclasses.replace(
            metadata,
            state_dict_metadata=self.by_new_name(metadata.state_dict_metadata),
            planner_data=metadata.planner_data and self._new_paths(metadata.planner_data),
            storage_data={
                dataclasses.replace(index, fqn=new): location
                for index, location in metadata.storage_data.items()
                if (new := self.new_name(index.fqn)) is not None
            },
        )

    def _new_paths(self, paths: Mapping[str, Any]) -> dict[str, Any]:
        return {new: new_path(path, new) for old, path in paths.items() if (new := self.new_name(old)) is not None}

    def _new_path_of_container(self, path: Iterable[Any]) -> Iterator[list[Any]]:
        typed = path_from_json(path)
        if new := self.new_name(name_path(typed)):
            yield path_to_json(new_path(typed, new))


def check_rename(rename: Rename | None) -> None:
    """Raise `InvalidOptionError` for what cannot rename."""
    is_mapping = isinstance(rename, Mapping) and all(isinstance(one, str) for pair in rename.items() for one in pair)
    if rename is not None and not (is_mapping and rename) and not callable(rename):
        raise InvalidOptionError(f"{_ADVICE}: pass a dict, as in {{'ema': 'model'}}, or a function, not {rename!r}")


def is_below(name: str, prefix: str) -> bool:
    """Return whether `prefix` is `name`, or the first parts of it."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def new_path(path: Sequence[Any], new: str) -> Path:
    """Return the path of an entry or container that is called `new`: it keeps the steps that both names end with.

    The other steps are texts. A key with dots, such as a parameter's in the state dict of a model, may be cut.
    """
    parts = new.split(".")
    kept: list[Any] = []
    for step in reversed(path):
        texts = str(step[0] if isinstance(step, tuple) else step).split(".")
        num_same = count_same_ends(parts, texts)
        if num_same:
            kept.insert(0, step if num_same == len(texts) else ".".join(texts[-num_same:]))
            parts = parts[:-num_same]
        if num_same < len(texts):
            break
    return (*parts, *kept)


def count_same_ends(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many parts both end with."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def suggest_rename(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return the prefixes by which more than half of what is wanted is found in a checkpoint, in its shape; {} if none.

    `saved` has torch's metadata by name, and `wanted` tensors and values.
    """
    sizes = {name: _size_of(saved[name]) for name in itertools.islice(saved, _MAX_COMPARED)}
    sample = {tuple(name.split(".")): _size_of(wanted[name]) for name in sorted(wanted)[:_MAX_SAMPLE]}
    first = next(iter(sample), ())
    best: tuple[int, int, Sequence[str], Sequence[str]] = (len(sample) // 2, 0, (), ())
    for parts in [tuple(name.split(".")) for name in sizes]:
        num_same = count_same_ends(parts, first)
        old, new = parts[: len(parts) - num_same], first[: len(first) - num_same]
        if num_same and num_same >= best[1] and old != new:
            fits = (
                one[: len(new)] == new and sizes.get(".".join((*old, *one[len(new) :])), _ABSENT) in (size, None)
                for one, size in sample.items()
            )
            best = max(best, (sum(fits), num_same, old, new))
    return {".".join(best[2]): ".".join(best[3])} if best[1] else {}


def _size_of(held: Any) -> tuple[int, ...] | None:
    size = getattr(held, "size", None)
    return None if size is None else tuple(size() if callable(size) else size)
