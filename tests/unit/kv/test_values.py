"""What users pass to a store: keys, lists, dense and row-sparse tensors."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kv.values import (
    RowSparse,
    as_key,
    as_value,
    check_key_type,
    flatten_tensor,
    group_by_key,
    row_numbers,
    sum_duplicate_rows,
    tensor_spec,
    write_tensor,
)
from reigen.types import dtype_named


def test_keys_are_ints_of_64_bits_or_strs() -> None:
    assert as_key(np.int32(7)) == 7
    assert type(as_key(np.int64(7))) is int
    assert as_key(2**32 + 2) == 2**32 + 2
    assert as_key("fc.weight") == "fc.weight"
    assert as_key(-1) == -1
    for wrong in (True, 1.0, None, (1,), 2**64, -(2**63) - 1):
        with pytest.raises(ArgumentError, match="key"):
            as_key(wrong)


def test_kinds_of_keys_are_not_mixed() -> None:
    assert check_key_type([1, 2]) is int
    assert check_key_type([], str) is str
    with pytest.raises(ArgumentError, match="mixed key types are not allowed: this store's keys are str, got 1"):
        check_key_type(["a", 1])
    with pytest.raises(ArgumentError, match="keys are int, got 'a'"):
        check_key_type(["a"], int)
    with pytest.raises(ArgumentError, match="mixed key types"):
        group_by_key([1, "a"], [0, 0])


@pytest.mark.parametrize(
    ("keys", "values", "groups"),
    [
        ("a", 1, [("a", [1])]),
        ("a", [1, 2], [("a", [1, 2])]),
        (["a"], [1], [("a", [1])]),
        ([3, 1], [[1, 2], 3], [(3, [1, 2]), (1, [3])]),
        ([3, 1, 3], [1, 2, [3]], [(3, [1, 3]), (1, [2])]),
        ([], [], []),
    ],
)
def test_values_are_grouped_by_key(keys: object, values: object, groups: object) -> None:
    assert group_by_key(keys, values) == groups


def test_lists_that_do_not_fit_are_refused() -> None:
    for keys, values, text in (
        (["a", "b"], [1], "2 keys need a list of 2 outs, got 1"),
        (["a"], np.ones(1), "1 keys need a list of 1 outs, got ndarray"),
        ("a", [], "needs at least one out"),
    ):
        with pytest.raises(ArgumentError, match=text):
            group_by_key(keys, values, "out")


def test_tensors_of_numpy_and_torch_are_seen_alike() -> None:
    for tensor in (np.arange(6, dtype=np.float16).reshape(2, 3), torch.arange(6, dtype=torch.float16).reshape(2, 3)):
        spec = tensor_spec(as_value(tensor))
        assert (spec.dtype.name, spec.shape, spec.stype, spec.num_elements, spec.row_length) == (
            "float16",
            (2, 3),
            "default",
            6,
            3,
        )
        elements, aliases = flatten_tensor(tensor)
        assert aliases
        assert elements.tolist() == [0, 1, 2, 3, 4, 5]
    assert str(tensor_spec(torch.zeros(2, dtype=torch.bfloat16))) == "bfloat16 (2,)"
    elements, aliases = flatten_tensor(torch.ones(2, dtype=torch.bfloat16))
    assert elements.dtype == np.uint16
    parameter = torch.nn.Parameter(torch.ones(3))
    assert flatten_tensor(parameter)[0].tolist() == [1, 1, 1]


def test_results_reach_tensors_of_any_layout() -> None:
    for tensor in (torch.zeros(3, 2).t(), torch.zeros(2, 3), np.zeros((3, 2)).T):
        elements, aliases = flatten_tensor(tensor)
        elements[:] = range(6)
        write_tensor(tensor, elements, aliases)
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_writing_what_autograd_has_saved_is_noticed() -> None:
    weight = torch.ones(2, requires_grad=True)
    saved = weight * 1
    loss = (saved * saved).sum()
    elements, aliases = flatten_tensor(saved)
    write_tensor(saved, elements, aliases)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_row_sparse_tensors_say_what_they_are() -> None:
    rows = RowSparse([2, 0], np.ones((2, 3), np.float32), (4, 3))
    assert str(tensor_spec(rows)) == "float32 (4, 3) (row-sparse)"
    assert rows.checked_indices().tolist() == [2, 0]
    assert RowSparse.empty(np.ones((5, 2))).shape == (5, 2)
    sparse = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    seen = as_value(sparse)
    assert isinstance(seen, RowSparse)
    assert (seen.indices.tolist(), seen.values.tolist(), seen.shape) == ([1, 3], [[1, 1], [2, 2]], (4, 2))
    with pytest.raises(UnsupportedTypeError, match="2 sparse dimensions"):
        as_value(torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (2, 2), check_invariants=True))
    with pytest.raises(ArgumentError, match=re.escape("values of shape (1, 3), not (2, 3)")):
        RowSparse([0], np.ones((2, 3)), (4, 3))
    with pytest.raises(ArgumentError, match="at least one dimension"):
        RowSparse([], np.ones(0), ())


def test_row_sparse_outs_receive_rows_in_their_framework() -> None:
    out = RowSparse.empty(torch.zeros(4, 2))
    out.receive(np.array([1, 3]), np.ones((2, 2), np.float32))
    assert torch.is_tensor(out.values)
    assert out.values.tolist() == [[1, 1], [1, 1]]
    assert out.checked_indices().tolist() == [1, 3]


@pytest.mark.parametrize("rows", [[3, 0, 3], np.array([[3], [0], [3]]), torch.tensor([3.0, 0.0, 3.0])])
def test_numbers_of_rows_come_in_any_form(rows: object) -> None:
    assert row_numbers(rows, 4).tolist() == [3, 0, 3]


def test_rows_that_do_not_exist_are_named() -> None:
    for rows, text in (
        ([4], "row 4 does not exist; there are rows 0 to 3"),
        ([-1], "row -1"),
        ([0.5], "whole numbers"),
    ):
        with pytest.raises(ArgumentError, match=text):
            row_numbers(rows, 4)
    assert row_numbers([], 4).tolist() == []


def test_rows_of_one_index_are_added_up() -> None:
    float64 = dtype_named("float64")
    indices, rows = sum_duplicate_rows(np.array([3, 1, 3]), np.array([[1.0], [2.0], [4.0]]), float64)
    assert (indices.tolist(), rows.tolist()) == ([1, 3], [[2], [5]])
    indices, rows = sum_duplicate_rows(np.array([3, 1]), np.array([[1.0], [2.0]]), float64)
    assert (indices.tolist(), rows.tolist()) == ([1, 3], [[2], [1]])
    # 2048 + 1 + 1 in float16 is 2048 where each sum is rounded
    halves = np.array([[2048], [1], [1]], np.float16)
    assert sum_duplicate_rows(np.zeros(3, np.int64), halves, dtype_named("float16"))[1].tolist() == [[2050]]
