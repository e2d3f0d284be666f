"""MXNet's adapter passes the conformance suite of adapters."""

from __future__ import annotations

import pytest

from reigen.mxnet.adapter import MXNetAdapter
from reigen.testing import check_adapter

pytestmark = pytest.mark.slow  # several processes


@pytest.mark.parametrize("size", [1, 2])
def test_conformance(rank_pool, size):
    names = check_adapter(MXNetAdapter, rank_pool(size), shapes=[(5,), (2, 3, 1)])
    assert {"uint8", "int8", "int32", "int64", "float16", "float32", "float64"} <= set(names)
