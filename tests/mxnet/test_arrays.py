"""NDArrays as NumPy arrays over the same memory."""

import mxnet as mx
import numpy as np
import pytest

from reigen.errors import UnsupportedTypeError
from reigen.mxnet import arrays

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_is_the_memory_itself(dtype):
    array = mx.nd.array(np.arange(6).reshape(2, 3), dtype=dtype) + 1  # a write that is perhaps still pending
    seen = arrays.view(array)
    assert seen.dtype == np.dtype(dtype) == arrays.dtype_of(array).storage
    np.testing.assert_array_equal(seen, np.arange(1, 7).reshape(2, 3))
    seen[1, 2] = 42
    assert array.asnumpy()[1, 2] == 42


def test_a_view_keeps_the_memory_alive():
    seen = arrays.view(mx.nd.full((1000,), 7))
    others = [mx.nd.zeros((1000,)) for _ in range(20)]  # would take the memory, if it were free
    mx.nd.waitall()
    assert len(others) == 20
    np.testing.assert_array_equal(seen, np.full(1000, 7))


def test_slices_and_empty_arrays():
    array = mx.nd.arange(12).reshape((4, 3))
    np.testing.assert_array_equal(arrays.view(array[1:3]), np.arange(3, 9).reshape(2, 3))
    assert arrays.view(mx.nd.ones((4, 3)).astype("int64")[2]).tolist() == [1, 1, 1]


def test_an_array_in_a_layout_of_onednn_is_reordered():
    image, kernel = np.random.default_rng(1).random((2, 16, 8, 8)), np.ones((16, 16, 1, 1))
    made = mx.nd.Convolution(mx.nd.array(image), mx.nd.array(kernel), no_bias=True, kernel=(1, 1), num_filter=16)
    expected = np.repeat(image.sum(axis=1, keepdims=True), 16, axis=1)
    np.testing.assert_allclose(arrays.view(made), expected, rtol=1e-5)


def test_reordering_in_the_engine_gives_an_operation_its_memory():
    image, kernel = np.ones((1, 16, 4, 4)), np.ones((16, 16, 1, 1))
    made = mx.nd.Convolution(mx.nd.array(image), mx.nd.array(kernel), no_bias=True, kernel=(1, 1), num_filter=16)
    made.wait_to_read()
    with pytest.raises(UnsupportedTypeError, match="oneDNN"):
        arrays.view_in_engine(made)
    arrays.reorder(made)
    made.wait_to_read()
    np.testing.assert_array_equal(arrays.view_in_engine(made), np.full((1, 16, 4, 4), 16))


def test_what_has_no_such_memory_is_refused():
    sparse = mx.nd.zeros((4, 3), stype="row_sparse")
    assert arrays.is_ndarray(sparse)
    assert arrays.is_sparse(sparse)
    with pytest.raises(UnsupportedTypeError, match="row_sparse"):
        arrays.view(sparse)
    assert not arrays.is_ndarray(np.zeros(3))
    assert arrays.is_ndarray(mx.np.zeros(3))
