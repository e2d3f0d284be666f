"""Numbers with units in files that people write: lengths of time, rates, sizes."""

from __future__ import annotations

import math
import re

from reigen.errors import ArgumentError

_NUMBER = re.compile(r"\s*([0-9.eE+-]+)\s*([^\s0-9].*?)?\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATES = {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()}
_RATES |= {f"{prefix}B/s": factor for prefix, factor in (_PREFIXES | _BINARY).items()}


def format_number(value: float) -> str:
    """Format a number with four digits, or all before the point.

    Example:
        >>> format_number(0.123456), format_number(26912.3)
        ('0.1235', '26,912')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def parse_time(value: object, what: str) -> float:
    """Return seconds of a number, or of a text such as ``50 us``; ``what`` names it in errors.

    Raises:
        ArgumentError: it is no length of time.
    """
    return _parse(value, what, _TIMES, "seconds, or a text such as '50 us'")


def parse_rate(value: object, what: str) -> float:
    """Return bytes a second of a number, or of a text such as ``25 Gbit/s`` or ``3 GB/s``.

    Raises:
        ArgumentError: it is no rate.
    """
    return _parse(value, what, _RATES, "bytes a second, or a text such as '25 Gbit/s'")


def parse_number(value: object, what: str) -> float:
    """Return a finite number that is not negative.

    Raises:
        ArgumentError: it is none.
    """
    return _parse(value, what, {}, "a number")


def parse_count(value: object, what: str) -> int:
    """Return a whole number that is not negative.

    Raises:
        ArgumentError: it is none.
    """
    number = _parse(value, what, {}, "a whole number")
    if number != int(number):
        raise ArgumentError(f"{what}: {value!r} is no whole number")
    return int(number)


def _parse(value: object, what: str, units: dict[str, float], expected: str) -> float:
    number, unit = math.nan, ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (found := _NUMBER.fullmatch(value)):
        unit = (found[2] or "").strip()
        try:
            number = float(found[1]) * (units[unit] if unit else 1.0)
        except (KeyError, ValueError):
            number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentError(f"{what}: {value!r} is not {expected}")
    return number
