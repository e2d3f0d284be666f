"""Sizes and times as the launcher shows them to the user."""

from __future__ import annotations

_KIB = 1024


def format_bytes(number: float) -> str:
    """Return ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if number < _KIB:
            return f"{number:.0f} {unit}"
        number /= _KIB
    return f"{number:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """Return ``42 s``, ``12 min`` or ``5.2 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
