"""Metrics, as users give them and as manifests keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from cloudckpt.errors import InvalidOptionError

STEP_KEY = "step"
METRICS_KEY = "metrics"
"""In the manifest's ``metadata``."""


def checked(metrics: Mapping[str, SupportsFloat] | None) -> dict[str, float | None]:
    """As JSON can hold them: None is what is not finite. Raises `InvalidOptionError` for what is no number by name."""
    if not isinstance(metrics, (Mapping, type(None))):
        raise InvalidOptionError(f"metrics are numbers by name, not {metrics!r:.80}")
    numbers: dict[str, float | None] = {}
    for name, value in (metrics or {}).items():
        try:
            plain = getattr(value, "detach", lambda value=value: value)()  # torch warns of a loss with its graph
            number = None if isinstance(value, (str, bytes)) or not _is_text(name) else float(plain)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor that is no scalar
            number = None
        if number is None:
            raise InvalidOptionError(f"metrics are numbers by name, not {name!r}: {value!r:.80}")
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def _is_text(name: object) -> bool:
    """Such as JSON can hold."""
    return isinstance(name, str) and not any("\ud800" <= character <= "\udfff" for character in name)


def metadata_of(step: int, numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """What goes into the manifest."""
    return {STEP_KEY: step, METRICS_KEY: dict(numbers)} if numbers else {STEP_KEY: step}


def metrics_in(metadata: Mapping[str, Any]) -> dict[str, float]:
    """What a manifest says. Whatever else lies there under that name is another program's."""
    values = metadata.get(METRICS_KEY)
    if not isinstance(values, dict):
        return {}
    return {
        name: _as_float(value)
        for name, value in values.items()
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }


def _as_float(value: float | None) -> float:
    """NaN for what no float can hold, as for None."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number in JSON can have any number of digits
        return math.nan
