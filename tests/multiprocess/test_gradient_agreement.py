"""Ranks agree on a list of gradients, some of which are missing on some ranks."""

from __future__ import annotations

import pytest

from reigen import context
from reigen.api.gradients.gradient_agreement import GradientKind, agree_on_gradients
from reigen.errors import MismatchError

_M, _D, _S = GradientKind.MISSING, GradientKind.DENSE, GradientKind.SPARSE


def agree(kinds: list[list[GradientKind]]) -> list[GradientKind]:
    job = context.current()
    return agree_on_gradients(job, [f"variable {place}" for place in range(5)], kinds[job.rank], "gradients")


def test_what_is_missing_or_sparse_everywhere_stays_so_and_the_rest_is_dense(rank_pool):
    kinds = [[_M, _D, _S, _M, _S], [_M, _D, _S, _S, _D]]
    assert rank_pool(2).run(agree, kinds, init=True) == [[_M, _D, _S, _D, _D]] * 2


def differ() -> dict[int, str]:
    job = context.current()
    with pytest.raises(MismatchError) as raised:
        agree_on_gradients(job, ["options", f"variable of {job.rank} rows"], [_D], "gradients")
    return dict(raised.value.details)


def test_different_variables_are_an_error_on_all_ranks(rank_pool):
    expected = {0: "variable of 0 rows", 1: "variable of 1 rows"}
    assert rank_pool(2).run(differ, init=True) == [expected] * 2
