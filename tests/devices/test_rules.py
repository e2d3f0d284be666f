"""What devices are asked to reduce, and how; which devices go together."""

from __future__ import annotations

import math

import pytest

from reigen.backends.device.rules import (
    DeviceReduction,
    RankDeviceInfo,
    explain_unsupported,
    find_device_mismatch,
    make_device_reduction,
)
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp


@pytest.mark.parametrize(
    ("dtype", "op", "prescale", "postscale", "reason"),
    [
        ("int16", ReduceOp.SUM, 1.0, 1.0, "process groups have no int16"),
        ("uint16", ReduceOp.MAX, 1.0, 1.0, "process groups have no uint16"),
        ("float32", ReduceOp.ADASUM, 1.0, 1.0, "Adasum works on the host"),
        ("int32", ReduceOp.AVERAGE, 1.0, 1.0, "devices do not scale int32 as the host does"),
        ("int64", ReduceOp.SUM, 0.5, 1.0, "devices do not scale int64 as the host does"),
        ("float32", ReduceOp.MAX, 2.0, 1.0, "devices have no factors for op=Max"),
        ("float64", ReduceOp.PRODUCT, 1.0, 2.0, "devices have no factors for op=Product"),
        ("float16", ReduceOp.SUM, 1e-5, 1.0, "the factors 1e-05 and 1.0, taken together, do not fit float16"),
        ("float16", ReduceOp.AVERAGE, 0.05, 1.0, "the factors 0.05 and 1.0, taken together, do not fit float16"),
        ("float16", ReduceOp.SUM, 1e5, 1.0, "the factors 100000.0 and 1.0, taken together, do not fit float16"),
        ("float32", ReduceOp.SUM, math.nan, 1.0, "the factors nan and 1.0, taken together, do not fit float32"),
        ("float32", ReduceOp.SUM, math.inf, 1.0, "the factors inf and 1.0, taken together, do not fit float32"),
    ],
)
def test_refused(dtype: str, op: ReduceOp, prescale: float, postscale: float, reason: str) -> None:
    assert explain_unsupported(DTYPES[dtype], op, prescale, postscale) == reason


@pytest.mark.parametrize(
    ("dtype", "op", "prescale", "postscale"),
    [
        ("float16", ReduceOp.AVERAGE, 1.0, 1.0),
        ("float16", ReduceOp.SUM, 1e-5, 1e5),
        ("bfloat16", ReduceOp.AVERAGE, 1e-30, 1.0),
        ("float32", ReduceOp.SUM, 0.0, 1.0),
        ("int64", ReduceOp.SUM, 1.0, 1.0),
        ("bool", ReduceOp.PRODUCT, 1.0, 1.0),
        ("uint8", ReduceOp.MIN, 1.0, 1.0),
    ],
)
def test_not_refused(dtype: str, op: ReduceOp, prescale: float, postscale: float) -> None:
    assert explain_unsupported(DTYPES[dtype], op, prescale, postscale) is None


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("float32", ReduceOp.SUM, DeviceReduction("SUM")),
        ("float32", ReduceOp.AVERAGE, DeviceReduction("SUM", 1 / 3)),
        ("bfloat16", ReduceOp.MAX, DeviceReduction("MAX")),
        ("int64", ReduceOp.MIN, DeviceReduction("MIN")),
        ("float64", ReduceOp.PRODUCT, DeviceReduction("PRODUCT")),
        ("bool", ReduceOp.SUM, DeviceReduction("MAX", as_bytes=True)),
        ("bool", ReduceOp.PRODUCT, DeviceReduction("MIN", as_bytes=True)),
    ],
)
def test_reductions(dtype: str, op: ReduceOp, expected: DeviceReduction) -> None:
    assert make_device_reduction(Reduction(DTYPES[dtype], op, 3)) == expected


def test_factors_and_divisor_are_one_factor() -> None:
    """An average divides by the ranks that count: those that have joined stand in, and do not."""
    dtype = DTYPES["float32"]
    assert make_device_reduction(Reduction(dtype, ReduceOp.AVERAGE, 2)) == DeviceReduction("SUM", 0.5)
    assert make_device_reduction(Reduction(dtype, ReduceOp.AVERAGE, 2, 2.0)) == DeviceReduction("SUM")
    assert make_device_reduction(Reduction(dtype, ReduceOp.SUM, 2, 3.0, 0.5)) == DeviceReduction("SUM", 1.5)


def fact(host: str = "h", device: str = "GPU-0", library: str = "NCCL 2.27.3") -> RankDeviceInfo:
    return RankDeviceInfo(host, device, "cuda:0", library)


def test_gpus_that_go_together() -> None:
    assert find_device_mismatch([fact()]) is None
    assert find_device_mismatch([fact(), fact(device="GPU-1"), fact(host="i")]) is None


def test_gpus_that_do_not() -> None:
    told = find_device_mismatch([fact(), fact(device="GPU-1"), fact()])
    assert told is not None
    assert "several ranks use one GPU" in told[0]
    assert told[1] == {0: "cuda:0 (GPU-0)", 2: "cuda:0 (GPU-0)"}
    told = find_device_mismatch([fact(), fact(device="GPU-1", library="NCCL 2.18.5")])
    assert told == (
        "the ranks have different libraries for their devices",
        {0: "NCCL 2.27.3", 1: "NCCL 2.18.5"},
    )
