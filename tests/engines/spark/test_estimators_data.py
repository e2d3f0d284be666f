"""Rows of Parquet files in batches: each one once an epoch, and as the arrays that they are."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed here (pip install 'reigen[spark-estimators]')")
pytest.importorskip("pandas", reason="pandas is not installed here (pip install 'reigen[spark-estimators]')")

import pyarrow.parquet as pq  # noqa: E402

from reigen.spark import data_parquet  # noqa: E402
from reigen.spark.data_parquet import (  # noqa: E402
    BatchReader,
    ReadOptions,
    apply_transformation,
    cut_batches,
    open_rows,
    to_array,
)
from reigen.spark.data_rows import RowPlan  # noqa: E402
from reigen.spark.store import Store  # noqa: E402

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


@pytest.fixture(autouse=True)
def pyarrow_started() -> None:
    """Its pool of threads, which stays, is there before a test is looked at for what it leaves."""
    pa.table({"x": list(range(9))}).take([1, 2])


@pytest.fixture
def no_leaks() -> None:
    """Arrow keeps threads of its own."""


def write_rows(directory: Path, sizes: list[int], group: int) -> Store:
    """Files of so many rows, numbered from 0 on, in row groups of ``group`` rows."""
    first = 0
    (directory / "data").mkdir()
    for number, size in enumerate(sizes):
        ids = np.arange(first, first + size)
        table = pa.table(
            {"id": ids, "x": ids * 0.5, "v": pa.array([[float(each), -1.0] for each in ids], pa.list_(pa.float64()))}
        )
        pq.write_table(table, directory / "data" / f"part-{number}.parquet", row_group_size=group)
        first += size
    return Store.create(str(directory))


def reader(store: Store, rank: int, size: int, batch: int = 4, **options: Any) -> BatchReader:
    rows = open_rows(store, store.prefix_path + "/data")
    in_memory = options.get("in_memory", False)
    plan = RowPlan(rows.group_rows, size, rank, batch, seed=5, same_part=in_memory)
    return BatchReader(rows, plan, ReadOptions(options.pop("columns", ("id", "x", "v")), **options))


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[10, 7, 0, 6], [25], [3, 3, 1]])
def test_each_row_is_used_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], size: int, in_memory: bool
) -> None:
    monkeypatch.setattr(data_parquet, "CHUNK_BYTES", 100)  # several chunks
    store = write_rows(tmp_path, sizes, group=3)
    readers = [reader(store, rank, size, in_memory=in_memory) for rank in range(size)]
    steps = readers[0]._plan.num_steps
    orders = []
    for epoch in range(3):
        found = [list(each.batches(epoch * steps, steps)) for each in readers]
        assert [len(batches) for batches in found] == [steps] * size
        ids = [int(number) for batches in found for batch, _ in batches for number in batch["id"]]
        assert Counter(ids) == Counter(range(sum(sizes)))
        for batch, _ in (each for batches in found for each in batches):
            np.testing.assert_array_equal(batch["x"], batch["id"] * 0.5)
            np.testing.assert_array_equal(batch["v"], np.stack([batch["id"], -np.ones(len(batch["id"]))], 1))
        orders.append(ids)
    assert orders[0] != orders[1] != orders[2]


def test_steps_that_end_within_a_pass_go_on_there(tmp_path: Path) -> None:
    store = write_rows(tmp_path, [20], group=4)
    whole = [batch["id"].tolist() for batch, _ in reader(store, 0, 1).batches(0, 15)]
    parts = [batch["id"].tolist() for first in (0, 3, 6, 9, 12) for batch, _ in reader(store, 0, 1).batches(first, 3)]
    assert parts == whole
    assert Counter(number for batch in whole for number in batch) == Counter([*range(20)] * 3)


def test_validation_reads_all_rows_also_where_they_are_fewer_than_ranks(tmp_path: Path) -> None:
    store = write_rows(tmp_path, [2], group=1)
    rows = open_rows(store, store.prefix_path + "/data")
    found = [
        [
            batch["id"].tolist()
            for batch in BatchReader(rows, RowPlan([1, 1], 3, rank, 1, False), ReadOptions(["id"])).all_batches()
        ]
        for rank in range(3)
    ]
    assert sorted(number for batches in found for batch in batches for number in batch) == [0, 1]
    assert [] in found


def test_vectors_dense_and_sparse_are_rows_of_a_matrix() -> None:
    cells = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
        {"type": 0, "size": 3, "indices": [2], "values": [5.0]},
        {"type": 0, "size": 3, "indices": [], "values": []},
        {"type": 1, "size": None, "indices": None, "values": [0.0, -1.0, 0.0]},
        {"type": 0, "size": 3, "indices": [0, 1], "values": [7.0, 8.0]},
    ]
    truth = [[1, 2, 3], [0, 0, 5], [0, 0, 0], [0, -1, 0], [7, 8, 0]]
    column = pa.chunked_array([pa.array(cells, VECTOR)])
    np.testing.assert_array_equal(to_array(column, "v"), truth)
    np.testing.assert_array_equal(to_array(column.slice(1, 3), "v"), truth[1:4])


@pytest.mark.parametrize(
    ("values", "dtype", "truth"),
    [
        ([1, 2], pa.int32(), [1, 2]),
        ([True, False], pa.bool_(), [True, False]),
        ([Decimal("1.50"), Decimal("2.25")], pa.decimal128(5, 2), [1.5, 2.25]),
        ([[1, 2], [3, 4]], pa.list_(pa.int64()), [[1, 2], [3, 4]]),
        ([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32())), [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ([], pa.float64(), []),
    ],
)
def test_columns_are_arrays(values: list[Any], dtype: Any, truth: list[Any]) -> None:
    np.testing.assert_array_equal(to_array(pa.chunked_array([pa.array(values, dtype)]), "c"), truth)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, None], "column 'c' has missing values"),
        ([[1.0], [None]], "column 'c' has missing values"),
        (["a", "b"], "column 'c' is of type string, which is no number"),
        ([[1, 2], [3]], "column 'c' has vectors of 1 and of 2 elements"),
    ],
)
def test_what_is_no_column_of_numbers_is_named(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_array(pa.chunked_array([pa.array(values)]), "c")


def test_a_transformation_makes_columns_of_rows(tmp_path: Path) -> None:
    def transform(frame: Any) -> Any:
        frame["twice"] = frame["id"] * 2
        frame["sum"] = [float(vector.sum()) for vector in frame["v"]]
        frame["pair"] = [np.array([number, number]) for number in frame["id"]]
        return frame

    store = write_rows(tmp_path, [9], group=4)
    found = reader(store, 0, 1, columns=("twice", "sum", "pair", "id"), transformation=transform, removed=("x",))
    for batch, _ in found.batches(0, 3):
        assert set(batch) == {"twice", "sum", "pair", "id"}
        np.testing.assert_array_equal(batch["twice"], batch["id"] * 2)
        np.testing.assert_array_equal(batch["sum"], batch["id"] - 1.0)
        np.testing.assert_array_equal(batch["pair"], np.stack([batch["id"], batch["id"]], 1))


def test_a_transformation_keeps_the_rows() -> None:
    table = pa.table({"x": [1, 2, 3]})
    with pytest.raises(ValueError, match=r"must return a pandas.DataFrame of the 3 rows that it got, and gave 2 rows"):
        apply_transformation(table, lambda frame: frame[:2])
    with pytest.raises(ValueError, match="and gave list"):
        apply_transformation(table, lambda frame: [1])


def test_a_column_that_is_removed_and_wanted_is_missing(tmp_path: Path) -> None:
    store = write_rows(tmp_path, [9], group=4)
    with pytest.raises(ValueError, match=r"there are no columns \['x'\]"):
        list(reader(store, 0, 1, columns=("x",), transformation=lambda frame: frame, removed=("x",)).batches(0, 1))


def test_files_of_a_directory_have_the_same_columns(tmp_path: Path) -> None:
    store = write_rows(tmp_path, [4], group=4)
    with pytest.raises(ValueError, match=r"there are no Parquet files in .*nothing"):
        open_rows(store, store.prefix_path + "/nothing")
    pq.write_table(pa.table({"id": ["text"]}), tmp_path / "data" / "z.parquet")
    with pytest.raises(ValueError, match=r"z.parquet has columns \{'id': 'other'\}"):
        open_rows(store, store.prefix_path + "/data")


def test_batches_are_cut_across_chunks() -> None:
    chunks = ({"x": np.arange(first, first + 3)} for first in (0, 3, 6))
    assert [batch["x"].tolist() for batch in cut_batches(chunks, [2, 5, 4])] == [[0, 1], [2, 3, 4, 5, 6], [7, 8]]
