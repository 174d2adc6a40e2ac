"""Values of the commands' options, and which of two places they are for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import typer

from cloudckpt.cli._options import PairOptions, parse_duration, parse_size

S3, OTHER, PATH, MEMORY, GS = "s3://bucket/a", "s3://bucket/b", "/data/a", "memory://name/a", "gs://bucket/a"


@pytest.mark.parametrize(
    ("given", "places", "expected"),
    [
        ({}, (S3, PATH), ({}, {})),
        ({"endpoint_url": "u"}, (S3, OTHER), ({"endpoint_url": "u"}, {"endpoint_url": "u"})),
        ({"endpoint_url": "u"}, (S3, PATH), ({"endpoint_url": "u"}, {})),
        ({"endpoint_url": "u"}, (PATH, S3), ({}, {"endpoint_url": "u"})),
        ({"endpoint_url": "u"}, (MEMORY, S3), ({}, {"endpoint_url": "u"})),
        ({"endpoint_url": "u"}, (S3, GS), ({"endpoint_url": "u"}, {})),
        (
            {"endpoint_url": "u", "target_endpoint_url": "v"},
            (S3, OTHER),
            ({"endpoint_url": "u"}, {"endpoint_url": "v"}),
        ),
        ({"target_endpoint_url": "v"}, (S3, OTHER), ({}, {"endpoint_url": "v"})),
        ({"target_storage_option": ["region=r"]}, (S3, OTHER), ({}, {"region": "r"})),
        (
            {"storage_option": ["region=r", "endpoint_url=u"], "endpoint_url": "v", "profile": "p"},
            (S3, OTHER),
            ({"region": "r", "endpoint_url": "v", "profile": "p"},) * 2,
        ),
        (
            {"profile": "p", "target_storage_option": ["region=r"], "target_endpoint_url": "v"},
            (S3, OTHER),
            ({"profile": "p"}, {"region": "r", "endpoint_url": "v"}),
        ),
    ],
    ids=str,
)
def test_each_place_gets_the_options_that_are_for_it(
    given: dict[str, Any], places: tuple[str, str], expected: tuple[dict[str, str], dict[str, str]]
) -> None:
    """If this fails, a copy or a comparison asks one server for what is on the other, or goes there without options."""
    both = PairOptions(timeout=7.5, **given).options_of_both(*places)
    assert tuple(dict(one.storage_options) for one in both) == expected
    assert [one.timeout_s for one in both] == [7.5, 7.5]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("2 min", 120),
        ("3m", 180),
        ("24h", 86400),
        ("7D", 7 * 86400),
        ("1w", 7 * 86400),
        ("0", 0),
        ("1.5h", 5400),
        ("0.5d", 43200),
    ],
)
def test_durations_have_units(text: str, seconds: int) -> None:
    """If this fails, ``gc --older-than`` takes another time than was meant, and removes the data of running saves."""
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1000", 1000),
        ("64MiB", 2**26),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("3k", 3000),
        ("1tib", 2**40),
        ("7b", 7),
    ],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    """If this fails, files of an export have another size than was asked for."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "-1h", "h", "5 years", "nan", "inf", "1e30d", "0x10"])
def test_value_without_meaning_is_refused(text: str) -> None:
    """If this fails, a slip in a number becomes another number."""
    for parse in (parse_duration, parse_size):
        with pytest.raises(typer.BadParameter):
            parse(text)
