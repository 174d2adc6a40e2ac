"""Values as people read them: sizes, rates, counts and times; results as short texts, and as tables in notebooks."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import logging
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

_log = logging.getLogger("cloudckpt")

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MB, _GB = 10**6, 10**9
_TEN_MS = 0.01
_MAX_ROWS, _MAX_ITEMS = 50, 20
_MAX_CELL_CHARS = 60
"""Maximum length of a cell that stays on one line."""
_OMITTED = {"place": "root"}  # a column is left out if all rows have this value
_NUMBER = re.compile(r"(-?[\d.,e+-]+( ([KMGTPE]iB|B|[kMG]B/s|m?s))?|-?nan|-?inf|)")
_MAX_TEXT = 400
"""Maximum length of a text in a ``repr``."""
SHOWN_AS = "shown_as"
"""The key, in a field's metadata, of a function that returns the value to show in place of the field's value."""
_T = TypeVar("_T")


@contextlib.contextmanager
def noting_interrupt(text: str, *others: type[BaseException]) -> Iterator[None]:
    """Let the last line of a traceback say `text` if Ctrl-C, or one of the `others`, ends the context."""
    interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, *others)
    try:
        yield
    except interrupts as error:
        add_note(error, text)
        raise


def add_note(error: BaseException, text: str) -> None:
    """Let the last line of a traceback say `text`. Log them, as a warning before Python 3.11, which has no notes."""
    add = getattr(error, "add_note", None)
    _log.log(logging.WARNING if add is None else logging.INFO, "%s", text)
    if add is not None:
        add(f"cloudckpt: {text}")


def size(num_bytes: float) -> str:
    """Return a number of bytes as text: ``1.5 GiB``."""
    if num_bytes < _KIB:
        return f"{num_bytes:.0f} B"
    for unit in _BINARY_UNITS:
        num_bytes /= _KIB
        if round(num_bytes, 1) < _KIB:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes:.1f} {_BINARY_UNITS[-1]}"


def rate(bytes_per_s: float) -> str:
    """Return a rate as text: ``1.23 GB/s``, decimal, as the rates of networks are."""
    if bytes_per_s >= _GB:
        return f"{bytes_per_s / _GB:.2f} GB/s"
    if bytes_per_s < _MB / 10:
        return f"{bytes_per_s / 1000:.1f} kB/s"
    return f"{bytes_per_s / _MB:.1f} MB/s"


def seconds(number: float) -> str:
    """Return a time as text: ``34 ms``, ``1.6 s``, ``75.3 s``."""
    if abs(number) >= 1:
        return f"{number:,.1f} s"
    return f"{number * 1000:.{0 if abs(number) >= _TEN_MS else 1}f} ms"


def transferred(num_bytes: int, spent_s: float) -> str:
    """``: 48.0 MiB in 1.6 s, 31.5 MB/s``; `` in 1.6 s`` if no byte moved in this process."""
    if not num_bytes:
        return f" in {seconds(spent_s)}"
    return f": {size(num_bytes)} in {seconds(spent_s)}, {rate(num_bytes / max(spent_s, 1e-9))}"


def count(number: int, noun: str) -> str:
    """Return a count as text: ``1 object``, ``2 objects``; ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def title_of(name: str) -> str:
    """Return a name, in quotes if it is blank."""
    return name if name.strip() else repr(name)


def date(moment: datetime) -> str:
    """Return a time as text: ``2026-01-31 12:00:00Z``."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%SZ}"


class _Brief(reprlib.Repr):
    """``repr`` with rounded numbers, and without the end of long texts and the middle of other long values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict, self.maxtuple, self.maxlist = 8, 3, 3
        self.maxother = 160

    def repr_str(self, value: str, _level: int) -> str:
        return repr(value if len(value) <= _MAX_TEXT else f"{value[: _MAX_TEXT - 1]}…")

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value) if vars(type(value)).get("__repr__") is _repr else super().repr_instance(value, level)

    def repr_float(self, value: float, _level: int) -> str:
        return f"{value:.4g}"

    def repr_int(self, value: int, _level: int) -> str:
        return f"{value:_}"

    def repr_datetime(self, value: datetime, _level: int) -> str:
        return repr(date(value))


def with_short_repr(cls: type[_T]) -> type[_T]:
    """Give a dataclass a short ``repr`` and, for notebooks, ``_repr_html_``.

    The ``repr`` leaves out the identifier of the save, and fields that are empty or have their defaults. A field that
    may hold a secret is declared with ``repr=False``, or with `SHOWN_AS` in its metadata.
    """
    untyped: Any = cls
    untyped.__repr__, untyped._repr_html_ = _repr, to_html
    return cls


def _repr(record: Any) -> str:
    fields = []
    for field in dataclasses.fields(record):
        value = _value_of(record, field)
        is_usual = value == (field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
        if field.repr and field.name != "attempt" and not is_usual and value not in ("", (), [], {}, None):
            is_long = isinstance(value, tuple) and len(value) > 1 and _are_dataclasses(value)
            fields.append(f"{field.name}=" + (f"<{len(value):,} in all>" if is_long else _Brief().repr(value)))
    return f"{type(record).__name__}({', '.join(fields)})"


def _value_of(record: Any, field: dataclasses.Field[Any]) -> Any:
    value = getattr(record, field.name)
    return field.metadata[SHOWN_AS](value) if SHOWN_AS in field.metadata else value


class Listing(list[_T]):
    """A list of dataclasses that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return _table_of_rows("", self) or "none"


class Rows(tuple[_T, ...]):
    """A tuple of dataclasses that a notebook shows as a table, for a field of a result."""

    __slots__ = ()
    _repr_html_ = Listing._repr_html_


def to_html(record: Any) -> str:
    """Return a dataclass as tables: its fields and numeric properties; below them, the dataclasses in it."""
    fields = ((field, _value_of(record, field)) for field in dataclasses.fields(record) if field.repr)
    values = {field.name: value for field, value in fields if value is False or not field.default == 0 == value}
    for name, member in (item for kind in type(record).__mro__ for item in vars(kind).items()):
        if isinstance(member, property) and isinstance(value := getattr(record, name), (int, float)):
            values[name] = value
    return pairs_to_html(type(record).__name__, values)


def pairs_to_html(title: str, values: Mapping[str, object]) -> str:
    """Return tables of values by name: dataclasses, and sequences of them, in tables below that of the others."""
    pairs, tables_below = [], []
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            tables_below.append(to_html(value).replace(_caption(type(value).__name__), _caption(name), 1))
        elif isinstance(value, (list, tuple)) and _are_dataclasses(value):
            tables_below.append(_table_of_rows(name, value))
        elif text := _text(name, value):
            pairs.append(f"<tr>{_cell(name, 'th')}{_cell(text)}</tr>")
    return f"<table>{_caption(title)}<tbody>{''.join(pairs)}</tbody></table>{''.join(tables_below)}"


def _table_of_rows(title: str, items: Sequence[Any]) -> str:
    """Return a table with a row for each item. Columns without a value in any row are left out."""
    rows = [dict(_columns(item)) for item in items[:_MAX_ROWS]]
    all_names = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in all_names if any(row.get(name) not in (None, "", _OMITTED.get(name)) for row in rows)]
    are_numbers = {name: all(map(_NUMBER.fullmatch, (row.get(name, "") for row in rows))) for name in names}
    head = "".join(_cell(name, "th", is_number=are_numbers[name]) for name in names)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(name, ''), is_number=are_numbers[name]) for name in names)}</tr>" for row in rows
    )
    more = f"<p>… and {len(items) - _MAX_ROWS:,} more</p>" if len(items) > _MAX_ROWS else ""
    return f"<table>{_caption(title)}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}" if rows else ""


def _columns(item: Any) -> Iterable[tuple[str, str]]:
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if isinstance(value, Mapping) and all(isinstance(metric, (int, float)) for metric in value.values()):
            field_names = {other.name for other in dataclasses.fields(item)}
            for name, metric in value.items():  # metrics
                title = title_of(str(name))
                yield f"{field.name}.{title}" if title in field_names else title, _text(str(name), metric)
        elif field.repr and field.name != "attempt":  # leave out counts that are 0
            yield field.name, "" if value is False or field.default == 0 == value else _text(field.name, value)


def _text(name: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _number_text(name, value)
    if isinstance(value, datetime):
        return date(value)
    if isinstance(value, Mapping):
        items = [f"{key}: {_text(str(key), item)}" for key, item in itertools.islice(value.items(), _MAX_ITEMS)]
        return ", ".join([*items, *["…"] * (len(value) > _MAX_ITEMS)])
    if isinstance(value, (list, tuple)) and not _are_dataclasses(value):
        is_shape = bool(value) and all(type(item) is int for item in value)
        return str([*value]) if is_shape else ", ".join(_text("", item) for item in value)
    if value is None or isinstance(value, (bool, str, BaseException)):
        return "" if value is None else str(value)
    return _Brief().repr(value)


def _number_text(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return rate(value)
    if "_bytes" in name:
        return size(value)
    if name.endswith("_s"):
        return seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _are_dataclasses(values: Sequence[object]) -> bool:
    return bool(values) and all(map(dataclasses.is_dataclass, values))


def _cell(text: str, tag: str = "td", *, is_number: bool = False) -> str:
    # Colours and lines are the notebook's own, which has a light and a dark theme.
    wrap = "white-space:nowrap" if len(text) <= _MAX_CELL_CHARS else "overflow-wrap:anywhere"
    return f'<{tag} style="text-align:{"right" if is_number else "left"};{wrap}">{html.escape(text)}</{tag}>'


def _caption(title: str) -> str:
    return f'<caption style="text-align:left;font-weight:bold">{html.escape(title)}</caption>' if title else ""


def find_shown_begin(before: str, after: str, *, max_chars: int) -> int:
    """Return the index from which `max_chars` show the first difference of two texts; 0 if both are short enough."""
    if max(len(before), len(after)) <= max_chars:
        return 0
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    return max(sum(1 for _ in same) - max_chars // 2, 0)
