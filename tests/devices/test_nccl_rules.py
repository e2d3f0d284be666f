"""What NCCL is asked to reduce, and how; which GPUs go together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reigen.kernels.reduce import Reduction
from reigen.planes.nccl_rules import AVERAGE, MAX, MIN, PRODUCT, SUM, Fact, Recipe, disagreement, recipe, refusal
from reigen.testing.truth import narrowed
from reigen.types import DTYPES, ReduceOp


@pytest.mark.parametrize(
    ("dtype", "op", "prescale", "postscale", "reason"),
    [
        ("int16", ReduceOp.SUM, 1.0, 1.0, "NCCL has no int16"),
        ("uint16", ReduceOp.MAX, 1.0, 1.0, "NCCL has no uint16"),
        ("float32", ReduceOp.ADASUM, 1.0, 1.0, "Adasum works on the host"),
        ("int32", ReduceOp.AVERAGE, 1.0, 1.0, "NCCL does not scale int32 as the host does"),
        ("int64", ReduceOp.SUM, 0.5, 1.0, "NCCL does not scale int64 as the host does"),
        ("float32", ReduceOp.MAX, 2.0, 1.0, "NCCL has no factors for op=Max"),
        ("float64", ReduceOp.PRODUCT, 1.0, 2.0, "NCCL has no factors for op=Product"),
        ("float16", ReduceOp.SUM, 1e-5, 1.0, "the factors 1e-05 and 1.0, taken together, do not fit float16"),
        ("float16", ReduceOp.AVERAGE, 0.05, 1.0, "the factors 0.05 and 1.0, taken together, do not fit float16"),
        ("float16", ReduceOp.SUM, 1e5, 1.0, "the factors 100000.0 and 1.0, taken together, do not fit float16"),
        ("float32", ReduceOp.SUM, math.nan, 1.0, "the factors nan and 1.0, taken together, do not fit float32"),
        ("float32", ReduceOp.SUM, math.inf, 1.0, "the factors inf and 1.0, taken together, do not fit float32"),
    ],
)
def test_refused(dtype: str, op: ReduceOp, prescale: float, postscale: float, reason: str) -> None:
    assert refusal(DTYPES[dtype], op, prescale, postscale) == reason


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
    assert refusal(DTYPES[dtype], op, prescale, postscale) is None


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("float32", ReduceOp.SUM, Recipe(7, SUM)),
        ("float32", ReduceOp.AVERAGE, Recipe(7, AVERAGE)),
        ("bfloat16", ReduceOp.MAX, Recipe(9, MAX)),
        ("int64", ReduceOp.MIN, Recipe(4, MIN)),
        ("float64", ReduceOp.PRODUCT, Recipe(8, PRODUCT)),
        ("bool", ReduceOp.SUM, Recipe(1, MAX)),
        ("bool", ReduceOp.PRODUCT, Recipe(1, MIN)),
    ],
)
def test_recipes(dtype: str, op: ReduceOp, expected: Recipe) -> None:
    assert recipe(Reduction(DTYPES[dtype], op, 3), 3) == expected


def test_an_average_over_fewer_ranks_divides_by_them() -> None:
    """Those that have joined stand in, and do not count."""
    assert recipe(Reduction(DTYPES["float32"], ReduceOp.AVERAGE, 2), 3) == Recipe(7, SUM, np.float32(0.5).tobytes())
    assert recipe(Reduction(DTYPES["float32"], ReduceOp.AVERAGE, 2, 2.0), 3) == Recipe(7, SUM)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("factor", [1 / 3, 1.5, -0.7, 1 / 1023, 60000.0, 257 / 256, 259 / 256])
def test_factors_are_rounded_to_nearest(dtype: str, factor: float) -> None:
    made = recipe(Reduction(DTYPES[dtype], ReduceOp.SUM, 2, factor), 2)
    assert made.factor == narrowed(np.array([factor]), DTYPES[dtype]).tobytes()


def fact(host: str = "h", device: str = "GPU-0", nccl: int = 22703) -> Fact:
    return Fact(host, device, "cuda:0", nccl)


def test_gpus_that_go_together() -> None:
    assert disagreement([fact()]) is None
    assert disagreement([fact(), fact(device="GPU-1"), fact(host="i")]) is None


def test_gpus_that_do_not() -> None:
    told = disagreement([fact(), fact(device="GPU-1"), fact()])
    assert told is not None
    assert "several ranks use one GPU" in told[0]
    assert told[1] == {0: "cuda:0 (GPU-0)", 2: "cuda:0 (GPU-0)"}
    told = disagreement([fact(), fact(device="GPU-1", nccl=21805)])
    assert told == ("the ranks have different versions of NCCL", {0: "22703", 1: "21805"})
