"""A checkpoint under the names that a load asks for: `rename` maps names of the checkpoint to these."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, TypeVar

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from cloudckpt._messages import did_you_mean, find_near, find_near_entry, quote_names
from cloudckpt.errors import InvalidOptionError, StateDictMismatchError
from cloudckpt.format.model import Manifest, StoredTuple, StoredWrapper
from cloudckpt.format.nesting import Path, name_path, path_from_json, path_to_json

Rename: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
_T = TypeVar("_T")
_Pair: TypeAlias = tuple[str, str]
_MAX_COMPARED_NAMES, _MAX_SAMPLE, _MAX_SHOWN = 5000, 50, 2
_FUNCTION = "<function>"
_log = logging.getLogger("cloudckpt")
_ADVICE = "rename maps names in the checkpoint to those of what is loaded"
_NOT_NEEDED = "rename=%s is not needed for %s, which has the new names: they are loaded"


class Renaming:
    """The new names of the entries of one checkpoint.

    An entry without a new name is hidden from the load. A mapping also hides each entry that it does not rename and
    that is below one of its new prefixes: only renamed entries are found there.

    Raises `StateDictMismatchError` if two entries get one new name, or if a part of `rename` fits no entry. The message
    then also names the parts whose new names fit none of `keys`, the keys that this rank loads, if they are known.
    `is_given` is False if the caller passes no `rename`.
    """

    def __init__(
        self, rename: Rename, names: Collection[str], *, uri: str, keys: Collection[str] = (), is_given: bool = True
    ) -> None:
        self._is_given = is_given
        self._function = rename if callable(rename) else None
        given = {} if callable(rename) else rename
        pairs = [(old.rstrip("."), None if new is None else new.rstrip(".")) for old, new in given.items()]
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
        self._uri = uri
        self.new_names: dict[str, str | None] = {}
        """The new name of each entry of the checkpoint, and of each tensor in parts; None for a hidden entry."""
        self.old_names: dict[str, str] = {}
        """The name in the checkpoint of each entry that a load sees, by its new one."""
        self.given: dict[str, set[str]] = {}
        """The new names that each part of `rename` has given, by its text."""
        self.lacking: list[str] = []
        """Names that the checkpoint lacks, and whose values objects of this rank keep with ``strict=False``."""
        for old in names:
            new, part = self._find(old)
            self.new_names[old] = new
            if part:
                self.given.setdefault(part, set()).update([] if new is None else [new])
            if new is not None and (other := self.old_names.setdefault(new, old)) != old:
                raise StateDictMismatchError(
                    f"rename gives both {other!r} and {old!r} of {uri} the name {new!r}. Leave one of them out: let a "
                    "function return None for it",
                    uri=uri,
                )
        expected = [_FUNCTION] if self._function is not None else [_part_text(*pair) for pair in self._pairs]
        if unused := [part for part in expected if part not in self.given]:
            raise StateDictMismatchError(self._explain(unused, names, keys), uri=uri)

    def _explain(self, unused: Collection[str], names: Collection[str], keys: Collection[str]) -> str:
        """Describe the `unused` parts, and those that lead to none of `keys`; suggest a map."""

        def leads_nowhere(new: str | None) -> bool:
            return new is not None and bool(keys) and not any(is_below(key, new) or is_below(new, key) for key in keys)

        unloaded: list[str] = []
        suggested: dict[str, str | None] = {}
        is_reversed = False
        for old, new in self._pairs:
            part, near_old, near_new = _part_text(old, new), old, new
            if part in unused:
                near_old = find_near_entry(old, names) or _find_longer(old, names)
                is_there = bool(new) and any(is_below(name, new or "") for name in names)
                if new and is_there and not leads_nowhere(old) and (leads_nowhere(new) or not near_old):
                    suggested[new], is_reversed = old, True
                    continue
            if new is not None and leads_nowhere(new):
                top, dot, suffix = new.partition(".")
                near_new = f"{near}{dot}{suffix}" if (near := find_near(top, keys)) else ""
                unloaded.append(part)
            if near_old and near_new != "":
                suggested[near_old] = near_new
        tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
        unloaded_text = f"; and {', '.join(unloaded)} leads to nothing that is loaded" if unloaded else ""
        direction = ", not the other way round" if is_reversed else ""
        used_pairs = [(old, new) for old, new in self._pairs if _part_text(old, new) not in unused]
        is_clear = len({*suggested.values()}) == len(suggested)
        advice = f". Did you mean rename={suggested}?" if is_clear and suggested.items() - used_pairs else ""
        return (
            f"rename={', '.join(unused)} changes no name of {self._uri}, which has {quote_names(tops)}{unloaded_text}. "
            f"{_ADVICE}{direction}{advice}"
        )

    def _find(self, old: str) -> tuple[str | None, str]:
        """Return the new name, and the part of `rename` that gives it; "" if no part does."""
        if self._function is not None:
            try:
                new = self._function(old)
            except Exception as error:
                raise InvalidOptionError(f"rename raised {type(error).__name__} for {old!r}: {error}") from error
            if new is not None and not isinstance(new, str):
                raise InvalidOptionError(f"rename must return a str or None, and it returned {new!r} for {old!r}")
            return new, "" if new == old else _FUNCTION
        for prefix, other in self._pairs:
            if is_below(old, prefix):
                if other is None:
                    return None, _part_text(prefix, None)
                suffix = old[len(prefix) :].removeprefix(".") if prefix else old
                return ".".join(filter(None, (other, suffix))), _part_text(prefix, other)
        return (None if any(is_below(old, other) for _, other in self._pairs if other is not None) else old), ""

    def pairs_to(self, keys: Collection[str]) -> dict[str, str]:
        """Return the pairs of the mapping whose new prefixes are, or are below, one of `keys`."""
        return {old: new for old, new in self._pairs if new is not None and any(is_below(new, key) for key in keys)}

    def advise_leaving_out(self, names: Collection[str]) -> str:
        """Return the words that say how to change the `rename` so that it leaves the entries with new `names` out."""
        olds = [self.old_names.get(name, name) for name in names]
        if self._function is not None:
            return f"strict=False, and let rename return None for {quote_names(olds)}"
        return f"strict=False, rename={ {**dict(self._pairs), **dict.fromkeys(olds)} }"

    def explain_unasked(self, asked: AbstractSet[str], lacking: Collection[str] = (), *, below: str = "") -> str:
        """Describe the parts that give only names that are not `asked` for; "" if there are none.

        Only parts that give names under the prefix `below` count. `lacking` are names that would have been asked for.
        """
        unused = {
            part: sorted(names)
            for part, names in self.given.items()
            if names and asked.isdisjoint(names) and all(name.startswith(below) for name in names)
        }
        if not unused or not self._is_given:
            return ""
        wanted = sorted({*lacking, *asked})
        news = {_part_text(old, new): new for old, new in self._pairs}
        near = [find_near_entry(news.get(part) or _common_path(names), wanted) for part, names in unused.items()]
        return (
            f"rename={', '.join(unused)} gives names of {self._uri} that nothing asks for, "
            f"{quote_names([name for names in unused.values() for name in names])}{did_you_mean(*near)}. The "
            f"load asks for {quote_names(wanted)}"
        )

    @property
    def checksum(self) -> int:
        """A number that differs if the new names of two ranks differ."""
        return zlib.crc32(repr(sorted(self.old_names.items())).encode(errors="surrogatepass"))

    @property
    def hidden(self) -> list[str]:
        """The entries that a mapping hides, and does not map to None. A function leaves them out on purpose."""
        hidden = [] if self._function is not None else [old for old, new in self.new_names.items() if new is None]
        return [old for old in hidden if not self._find(old)[1]]

    def find_root(self, prefix: str) -> str | None:
        """Return the only prefix in the checkpoint that becomes `prefix`; None if there are several, or none."""
        roots = {
            old.removesuffix(new.removeprefix(prefix)) if f".{old}".endswith(f".{new.removeprefix(prefix)}") else None
            for new, old in self.old_names.items()
            if new.startswith(prefix)
        }
        return roots.pop() if len(roots) == 1 else None

    def by_new_name(self, entries: Mapping[str, _T]) -> dict[str, _T]:
        """Return entries, such as all tensors, by their new names."""
        return {new: entries[old] for old in entries if (new := self.new_names.get(old)) is not None}

    def apply(self, manifest: Manifest) -> Manifest:
        """Return `manifest` with the new names."""
        wrappers: dict[str, StoredWrapper] = {}
        for old, wrapper in manifest.wrappers.items():
            news = [self.new_names.get(f"{old}.{part}") for part in wrapper.tensors]
            heads = {
                None if new is None or not new.endswith(f".{part}") else new.removesuffix(f".{part}")
                for new, part in zip(news, wrapper.tensors, strict=True)
            }
            (head, *others) = heads
            if others or (head is None and any(news)):
                raise self._taken_apart_error(old, wrapper.kind)
            self.new_names[old] = head
            if head is not None:
                wrappers[head] = wrapper
        typed = {name: path_from_json(path) for name, path in (manifest.typed_nesting or {}).items()}
        nesting = manifest.nesting
        containers = [*manifest.empty_mappings, *(stored_tuple.path for stored_tuple in manifest.tuples)]
        new_paths = self._find_container_paths({**(nesting or {}), **typed}) if containers else {}
        tuples = [
            (stored_tuple.kind, self._find_new_path(stored_tuple.path, new_paths)) for stored_tuple in manifest.tuples
        ]
        empty = [self._find_new_path(path, new_paths) for path in manifest.empty_mappings]
        return msgspec.structs.replace(
            manifest,
            tensors=self.by_new_name(manifest.tensors),
            values=self.by_new_name(manifest.values),
            wrappers=wrappers,
            nesting=None if nesting is None else self._new_paths(nesting),
            typed_nesting={name: path_to_json(path) for name, path in self._new_paths(typed).items()},
            empty_mappings=[path for path in empty if path is not None],
            tuples=[StoredTuple(path, kind) for kind, path in tuples if path is not None],
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
                if (new := self.new_names.get(index.fqn)) is not None
            },
        )

    def _new_paths(self, paths: Mapping[str, Any]) -> dict[str, Any]:
        return {new: new_path(path, new) for old, path in paths.items() if (new := self.new_names.get(old)) is not None}

    def _find_container_paths(self, paths: Mapping[str, Sequence[Any]]) -> dict[Path, set[Path | str | None]]:
        """Return the new paths of each container, by the entries in it.

        An entry gives its path; None if it is hidden; or its new name if more than the container's path changes.
        """
        new_paths: dict[Path, set[Path | str | None]] = {}
        for old, path in paths.items():
            new = self.new_names.get(old)
            changed = () if new is None else new_path(path, new)
            for depth in range(len(path)):
                tail = tuple(path[depth:])
                is_same = changed[-len(tail) :] == tail
                new_paths.setdefault(tuple(path[:depth]), set()).add(changed[: -len(tail)] if is_same else new)
        return new_paths

    def _find_new_path(self, path: Iterable[Any], new_paths: Mapping[Path, set[Path | str | None]]) -> list[Any] | None:
        """Return the new path of a tuple or an empty dict, which moves with the entries beside it; None if hidden."""
        typed = path_from_json(path)
        name = name_path(typed)
        if typed not in new_paths and self._function is None and (new := self._find(name)[0]) != name:
            return None if new is None else path_to_json(new_path(typed, new))
        for depth in range(len(typed), -1, -1):
            paths = new_paths.get(typed[:depth], set())
            heads = [path_or_name for path_or_name in paths if isinstance(path_or_name, tuple)]
            if paths == {None}:
                break
            if len(heads) == 1 and (depth < len(typed) or len(paths) == 1):
                return path_to_json((*heads[0], *typed[depth:]))
            if paths and depth == len(typed):
                raise self._taken_apart_error(name, "tuple")
        return None

    def _taken_apart_error(self, name: str, kind: str) -> StateDictMismatchError:
        return StateDictMismatchError(
            f"rename takes {name!r} of {self._uri} apart, which is a {kind}: it leaves out or renames a part of it. "
            "Rename all of it alike",
            uri=self._uri,
        )


def find_needed_rename(rename: Rename, names: Collection[str], *, uri: str, keys: Collection[str]) -> Rename | None:
    """Return `rename` without pairs that rename nothing: entries have the new prefix already, and not the old one.

    Each name has the old prefix "". So it is the old one unless `names` are below several of the `keys` of the load.
    """
    if callable(rename):
        with contextlib.suppress(Exception):  # `Renaming` names the entry
            if all(rename(name) == name for name in names):
                _log.warning(_NOT_NEEDED, "a function", uri)  # a warning, because a mistyped old name looks the same
                return None
        return rename
    tops = {name.partition(".")[0] for name in names}
    has_new_names = len(tops) > 1 and tops <= {*keys}
    done_pairs = {
        old: new
        for old, new in rename.items()
        if (has_new_names if not old else not any(is_below(name, old.rstrip(".")) for name in names))
        and any(is_below(name, new.rstrip(".")) for name in names if new is not None)
    }
    if done_pairs:
        _log.warning(_NOT_NEEDED, done_pairs, uri)
    return {old: new for old, new in rename.items() if old not in done_pairs} or None


def check_rename(rename: Rename | None) -> None:
    """Raise `InvalidOptionError` if `rename` is neither a dict of texts nor a function."""
    is_mapping = isinstance(rename, Mapping) and all(
        isinstance(old, str) and isinstance(new, str | None) for old, new in rename.items()
    )
    if rename is not None and not (is_mapping and rename) and not callable(rename):
        raise InvalidOptionError(f"{_ADVICE}: pass a dict, as in {{'ema': 'model'}}, or a function, not {rename!r}")


def _part_text(old: str, new: str | None) -> str:
    return f"{{{old!r}: {new!r}}}"


def _common_path(names: Iterable[str]) -> str:
    """Return the longest dotted path that all `names` begin with."""
    paths = sorted(name.split(".") for name in names)
    return ".".join(paths[0][: count_same_ends(paths[0][::-1], paths[-1][::-1])])


def _find_longer(name: str, names: Iterable[str]) -> str:
    """Return the only prefix of `names` that is `name` with parts added in the middle, as "ema.module.x"; else ""."""
    parts = name.split(".")
    cuts = [
        (".".join(parts[:position]) + ".", "." + ".".join(parts[position:]) + ".") for position in range(1, len(parts))
    ]
    longer = {
        dotted_name[: position + len(tail)]
        for dotted_name in (f"{entry}." for entry in itertools.islice(names, _MAX_COMPARED_NAMES))
        for head, tail in cuts
        if dotted_name.startswith(head) and (position := dotted_name.find(tail, len(head))) > 0
    }
    return longer.pop().removesuffix(".") if len(longer) == 1 else ""


def advise_extra(names: Sequence[object]) -> str:
    """Return the advice for saved entries that are in no object of the manager; "" for none."""
    return (
        f". To take {quote_names(names)} into extra, pass rename={{{names[0]!r}: 'extra.{names[0]}'}}" if names else ""
    )


def is_below(name: str, prefix: str) -> bool:
    """Return True if `name` is `prefix`, or is below it."""
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


def count_same_ends(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of last parts that both have in common."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def suggest_renames(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, renamed: Collection[str] = ()
) -> list[dict[str, str]]:
    """Return maps of prefixes by which a checkpoint has more than half of the wanted entries, or whole parts of them.

    `saved` has torch's metadata by name, and `wanted` tensors and values. An entry fits only with the wanted shape.
    `renamed` are names of `saved` that the load sees under others, such as those in safetensors files. Several maps are
    returned if they fit equally well, such as for two copies of a model; none if nothing fits.
    """
    alike: dict[tuple[str, Any], list[list[str]]] = defaultdict(list)
    for name in itertools.islice(saved, _MAX_COMPARED_NAMES):
        alike[name.rpartition(".")[2], _size_of(saved[name])].append(name.split("."))
    step = len(wanted) // _MAX_SAMPLE + 1
    sample = {name: _size_of(wanted[name]) for name in sorted(wanted)[::step]}
    fits_of_pair: dict[_Pair, dict[str, int]] = defaultdict(dict)
    for name, size in sample.items():
        parts = name.split(".")
        if name in renamed and _size_of(saved[name]) in {size, None}:
            # It fits under its own name, and no other layer of the same shapes takes its place.
            fits_of_pair[parts[0], parts[0]][name] = len(parts) - 1
            continue
        for others in itertools.chain(*(alike[parts[-1], saved_size] for saved_size in {size, None})):
            num_same = count_same_ends(others, parts)
            pair = ".".join(others[: len(others) - num_same]), ".".join(parts[: len(parts) - num_same])
            if pair[0] != pair[1] and not _differs_in_number(*pair):
                fits_of_pair[pair][name] = num_same
    ranks = {pair: (len(fits), max(fits.values()), _keeps_place(*pair)) for pair, fits in fits_of_pair.items()}
    ranked = sorted(fits_of_pair, key=lambda pair: (ranks[pair], pair), reverse=True)
    best, num_left = _choose(ranked, fits_of_pair, sample)
    maps = [best]

    def is_tied(pair: _Pair, other: _Pair) -> bool:
        # A sample may have a name more of one of two equal parts.
        if step == 1:
            return ranks[pair] == ranks[other]
        return abs(ranks[pair][0] - ranks[other][0]) <= 1 and ranks[pair][2] == ranks[other][2]

    tied = (
        pair for pair in ranked if pair not in best.items() and any(is_tied(pair, chosen) for chosen in best.items())
    )
    for pair in itertools.islice(tied, _MAX_SAMPLE):
        other, num_left_too = _choose([pair, *ranked], fits_of_pair, sample)
        if pair in other.items() and num_left_too <= num_left + (step > 1) and other not in maps:
            maps.append(other)
    return maps if best else []


def _keeps_place(old: str, new: str) -> tuple[bool, bool]:
    """Return if both names have the same numbers, such as a layer's, and if one has the last part of the other.

    Layers have the same shapes, so nothing else tells them apart. Of numbers, those count that both have. The first
    parts are keys of the load.
    """
    olds, news = old.split("."), new.split(".")
    numbers = zip(*([part for part in parts if part.isdigit()] for parts in (olds, news)), strict=False)
    old_words, new_words = ([part for part in parts if not part.isdigit()] or [""] for parts in (olds, news))
    has_last = old_words[-1] in new_words[1:] or new_words[-1] in old_words[1:]
    return all(number == other for number, other in numbers), has_last


def _differs_in_number(old: str, new: str) -> bool:
    """Return True for two layers of one list: a map of one to another is as wrong as right."""
    olds, news = old.split("."), new.split(".")
    return len(olds) == len(news) and all(
        one == two or (one.isdigit() and two.isdigit()) for one, two in zip(olds, news, strict=True)
    )


def _choose(
    pairs: Iterable[_Pair], fits_of_pair: Mapping[_Pair, Collection[str]], names: Iterable[str]
) -> tuple[dict[str, str], int]:
    """Return the first of `pairs` that fit beside each other, and the number of names for which they find nothing."""
    renames: dict[str, str] = {}
    unmatched = set(names)
    for old, new in pairs:
        fits = unmatched.intersection(fits_of_pair[old, new])
        is_part = 1 < len(fits) == sum(is_below(name, new) for name in unmatched)
        is_taken = any(is_below(old, renamed) or is_below(renamed, old) for renamed in renames)
        if not is_taken and (is_part or 2 * len(fits) > len(unmatched)):
            renames[old] = new
            unmatched -= fits
    return renames, len(unmatched)


def offer_renames(
    maps: Sequence[Mapping[str, str]],
    saved: Collection[str],
    wanted: Collection[str],
    *,
    whole_keys: Collection[str] | None = (),
    keys: Collection[str] = (),
    partial: str = "strict=False",
    say_rename: Callable[[str], str] = "pass rename={}".format,
) -> str:
    """Return the advice to load under other names: the first of `maps`, each with what else it needs.

    Returns "" if none can be used. If maps differ in the order of the new names alone, such as of two layers of one
    shape, one at most is right: the advice then leaves these names to the user. A map that lacks a `wanted` name comes
    with `partial`. One that leaves behind what the load must take comes with ``strict=False`` and the prefixes that
    stay behind.

    Args:
        maps: Maps that fit equally well.
        saved: The names in the checkpoint.
        wanted: The names that the load asks for.
        whole_keys: Top-level keys below which the load must take all that was saved. None means all keys.
        keys: Prefixes below which the load asks for all that exists, beside `wanted`.
        partial: The argument that lets a load lack names; "" if it lets entries stay behind and names lack.
        say_rename: Returns the words that say how to pass a map.

    """
    if len(maps) > len({(frozenset(renames), frozenset(renames.values())) for renames in maps}):
        all_news: dict[str, set[str]] = defaultdict(set)
        for old, new in sorted(itertools.chain(*(renames.items() for renames in maps))):
            all_news[old].add(new)
        open_news = {new for news in all_news.values() if len(news) > 1 for new in news}
        parts = (f"{old!r}: {min(news)!r}" if len(news) == 1 else f"{old!r}: …" for old, news in all_news.items())
        fitting = quote_names([old for old, news in all_news.items() if len(news) > 1])
        return (
            f"choose, since several parts fit equally well ({fitting} as {quote_names(sorted(open_news))}): "
            + say_rename(f"{{{', '.join(parts)}}}")
        )
    offers = []
    for renames in maps[: _MAX_SHOWN + 1]:
        try:
            renaming = Renaming(renames, saved, uri="")
        except StateDictMismatchError:  # it gives two entries one name
            continue
        hidden = renaming.hidden if whole_keys is None else []
        unasked = [
            old
            for new, old in renaming.old_names.items()
            if new not in wanted
            and (whole_keys is None or new.partition(".")[0] in whole_keys)
            and not any(is_below(new, key) for key in keys)
        ]
        unasked = [name for name in [*unasked, *hidden] if not name.startswith("random_state.")]
        lacks = not renaming.old_names.keys() >= {*wanted}
        needs = dict.fromkeys(["strict=False"] * bool(unasked) + [partial] * lacks) if partial else {}
        left_behind = f" (leaves {quote_names(common_prefixes(unasked, saved))} behind)" if unasked and partial else ""
        offers.append(", ".join([say_rename(str(renames)), *needs]) + left_behind)
    if len(offers) > 1:
        offers[1:] = [offer.removeprefix("pass ") for offer in offers[1:]]
        offers[-1] += f"{' or another map' if len(maps) > _MAX_SHOWN + 1 else ''}, which fit equally well"
    return " or ".join(offers)


def common_prefixes(names: Collection[str], among: Iterable[str]) -> list[str]:
    """Return the shortest prefixes below which all that is `among` the names of a checkpoint is one of `names`."""
    numbers: Counter[str] = Counter()
    for name in names:
        numbers.update(_prefixes_of(name))
    for name in {*names, *among}:
        numbers.subtract(_prefixes_of(name))
    return list(dict.fromkeys(next(prefix for prefix in _prefixes_of(name) if not numbers[prefix]) for name in names))


def _prefixes_of(name: str) -> list[str]:
    return [name[:position] for position, letter in enumerate(name) if letter == "."] + [name]


def _size_of(entry: Any) -> tuple[int, ...] | None:
    size = getattr(entry, "size", None)
    return None if size is None else tuple(size() if callable(size) else size)
