"""clip_global_norm, against torch's own and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from reigen.errors import ArgumentError
from reigen.torch import clip_global_norm


def gradients(*dtypes: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(3 + index, 4, generator=generator, dtype=torch.float64).to(dtype)
        for index, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_as_torch_clips(max_norm):
    arrays = gradients(torch.float32, torch.float64, torch.float32)
    twins = [torch.nn.Parameter(torch.zeros(array.shape, dtype=array.dtype)) for array in arrays]
    for twin, array in zip(twins, arrays, strict=True):
        twin.grad = array.clone()
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    norm = clip_global_norm([*arrays, None], max_norm)
    assert isinstance(norm, float)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for array, twin in zip(arrays, twins, strict=True):
        torch.testing.assert_close(array, twin.grad)
    if max_norm == 0.5:
        assert clip_global_norm(arrays, 10.0) == pytest.approx(0.5, rel=1e-5)


def test_what_is_small_enough_stays_bit_for_bit():
    arrays = gradients(torch.float32, torch.float16)
    before = [array.clone() for array in arrays]
    clip_global_norm(arrays, 1e3)
    assert all(torch.equal(array, each) for array, each in zip(arrays, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_beyond_the_range_of_a_half(dtype):
    array = torch.full((100,), 1000.0, dtype=dtype)  # the sum of squares is 1e8
    assert clip_global_norm([array], 100.0) == pytest.approx(10_000, rel=1e-2)
    torch.testing.assert_close(array, torch.full((100,), 10.0, dtype=dtype))


def test_a_tensor_comes_back_where_nothing_may_wait():
    arrays = gradients(torch.float32)
    norm = clip_global_norm(arrays, 0.1, check_isfinite=False)
    assert isinstance(norm, torch.Tensor)
    assert float(norm) > 0.1
    assert float(torch.linalg.vector_norm(arrays[0])) == pytest.approx(0.1, rel=1e-5)


def test_sparse_gradients_count_an_index_once():
    sparse = torch.sparse_coo_tensor([[1, 1, 4]], [[3.0], [3.0], [8.0]], (6, 1), check_invariants=True)
    assert clip_global_norm([sparse], 5.0) == pytest.approx(10.0)  # rows of 6 and 8
    torch.testing.assert_close(sparse.to_dense(), torch.tensor([[0.0], [3], [0], [0], [4], [0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite(bad):
    array = torch.tensor([1.0, bad, 2.0])
    with pytest.warns(UserWarning, match="nothing is clipped") as caught:
        norm = clip_global_norm([array], 1.0)
    assert not math.isfinite(norm)
    assert array[2] == 2.0
    assert caught[0].filename == __file__


def test_arguments():
    with pytest.raises(ArgumentError, match="at least one tensor"):
        clip_global_norm([None], 1.0)
    for max_norm in (0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match="above 0"):
            clip_global_norm([torch.zeros(1)], max_norm)
