"""Formatting of times and sizes."""

from __future__ import annotations


def format_time(micros: float) -> str:
    """Format a time with three digits and a unit: ``12.3 us``, ``4.57 ms``, ``2.50 s``."""
    unit, scale = ("s", 1e6) if micros >= 1e6 else ("ms", 1e3) if micros >= 1e3 else ("us", 1.0)
    value = micros / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a unit: ``40 B``, ``4.0 KiB``, ``25.0 MiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
