"""Sizes and times for people."""

from __future__ import annotations

from reigen.launch.units import format_bytes, format_seconds


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 << 20, 1.5 * 2**30)] == [
        "0 B", "1023 B", "1 KiB", "5 MiB", "1.5 GiB",
    ]  # fmt: skip
    assert [format_seconds(n) for n in (0.4, 99, 120, 18_000)] == ["0 s", "99 s", "2 min", "5.0 h"]
