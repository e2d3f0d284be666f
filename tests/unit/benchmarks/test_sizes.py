"""Sizes, ResNet-50's gradients, and what the kernel tells of the processor."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from benchmarks.harness.machine import cpu_model
from benchmarks.harness.sizes import format_size, parse_size, resnet50_counts, resnet50_shapes
from reigen.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1KiB", 1024), (" 25 MiB", 26214400), ("1GiB", 1 << 30), ("4096", 4096), ("12B", 12)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1kb", "-4", "1.5MiB", "0", "6", "²KiB"])
def test_what_is_no_size_of_float32_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1024, "1 KiB"), (3 << 20, "3 MiB"), (1 << 30, "1 GiB"), (1028, "1028 B")]
)
def test_sizes_are_written(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_resnet50_has_the_published_number_of_parameters() -> None:
    """161 tensors and 25,557,032 elements, as torchvision's documentation says."""
    shapes = resnet50_shapes()
    assert len(shapes) == 161
    assert sum(map(prod, shapes)) == 25_557_032
    assert shapes[0] == (64, 3, 7, 7)
    assert shapes[-2:] == [(1000, 2048), (1000,)]
    assert sum(len(shape) == 4 for shape in shapes) == 53


def test_backward_produces_the_last_layer_first() -> None:
    counts = resnet50_counts()
    assert counts[:2] == [1000, 2_048_000]
    assert counts[-1] == 64 * 3 * 7 * 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Other\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "implementer 0x41, part 0xd0c"),
    ],
)
def test_the_processor_is_named(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == expected
