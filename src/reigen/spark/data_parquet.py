"""Rows of Parquet files as NumPy arrays, in batches: read row group by row group, some ahead, and shuffled."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reigen.errors import ArgumentError
from reigen.spark.data_rows import RowPlan, RowRange, steps_from
from reigen.spark.store import Store

#: Columns by name: arrays of shape (rows,) for numbers, and (rows, elements) for vectors and lists of numbers.
Columns = dict[str, NDArray[Any]]
#: Function of a ``pandas.DataFrame`` of some rows, which returns one of as many rows.
Transformation = Callable[[Any], Any]

#: Rows are shuffled among each other within so many bytes, which a rank holds at a time.
CHUNK_BYTES = 128 << 20
_VECTOR_FIELDS = ("type", "size", "indices", "values")


@dataclass(frozen=True)
class RowGroup:
    """Row group of a Parquet file."""

    path: str
    number: int
    num_rows: int


@dataclass(frozen=True)
class ParquetRows:
    """Rows in a directory of a store.

    Attributes:
        groups: the row groups, in the same order for everybody.
        kinds: names of the columns, and what they hold: ``int``, ``float``, ``vector``, ``list`` or ``other``.
    """

    store: Store
    groups: tuple[RowGroup, ...]
    kinds: Mapping[str, str]

    @property
    def group_rows(self) -> list[int]:
        """Numbers of rows in the row groups."""
        return [group.num_rows for group in self.groups]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(self.group_rows)


@dataclass(frozen=True)
class ReadOptions:
    """Choices of how rows are read.

    Attributes:
        columns: names of the columns that are wanted, after the transformation.
        transformation: applied to the rows of each piece.
        removed: columns that are dropped after the transformation.
        num_workers: threads that read ahead.
        in_memory: keep a rank's rows after the first pass.
    """

    columns: Sequence[str]
    transformation: Transformation | None = None
    removed: Sequence[str] = ()
    num_workers: int = 2
    in_memory: bool = False


def open_rows(store: Store, path: str) -> ParquetRows:
    """Find the row groups of the Parquet files in a directory of a store.

    Raises:
        ArgumentError: there are none, or the files differ in their columns.
    """
    files = store.list_parquet_files(path)
    if not files:
        raise ArgumentError(f"there are no Parquet files in {path}")
    fs = store.fs

    def read_footer(file: str) -> tuple[list[RowGroup], Mapping[str, str]]:
        with fs.open(file, "rb") as stream:
            parquet = pq.ParquetFile(stream)
            footer = parquet.metadata
            groups = [
                RowGroup(file, number, footer.row_group(number).num_rows) for number in range(footer.num_row_groups)
            ]
            return groups, {each.name: kind_of(each.type) for each in parquet.schema_arrow}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read_footer, files))
    kinds = found[0][1]
    for file, (_, others) in zip(files, found, strict=True):
        if dict(others) != dict(kinds):
            raise ArgumentError(f"{file} has columns {dict(others)}, and {files[0]} has {dict(kinds)}")
    return ParquetRows(store, tuple(group for groups, _ in found for group in groups), kinds)


def kind_of(dtype: pa.DataType) -> str:
    """Return the kind of a column: ``int``, ``float``, ``vector`` (of Spark ML), ``list`` or ``other``."""
    if pa.types.is_integer(dtype) or pa.types.is_boolean(dtype):
        return "int"
    if pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        return "float"
    if _is_vector(dtype):
        return "vector"
    if _is_list(dtype):
        return "list"
    return "other"


class BatchReader:
    """Batches of a rank's rows.

    Args:
        rows: the rows of all ranks.
        plan: this rank's part of them.
        options: how they are read.
    """

    def __init__(self, rows: ParquetRows, plan: RowPlan, options: ReadOptions) -> None:
        self._rows, self._plan, self._options = rows, plan, options
        self._fs = rows.store.fs
        self._kept: Columns | None = None

    def batches(self, first: int, count: int) -> Iterator[tuple[Columns, float]]:
        """Yield the batches of some steps, each with the weight of its mean (`RowPlan.weight`).

        Args:
            first: number of the first step since training began. Where a pass over the data ends, the next begins.
            count: steps to take.

        Raises:
            ArgumentError: a column cannot be used.
        """
        sizes = self._plan.batch_sizes()
        for number, start, stop in steps_from(self._plan.num_steps, first, count):
            found = cut_batches(self._chunks(number), sizes)
            for step, batch in enumerate(itertools.islice(found, stop)):
                if step >= start:
                    yield batch, self._plan.weight(step)

    def all_batches(self) -> Iterator[Columns]:
        """Yield all rows of this rank once, in batches of the plan's size and a smaller one; there may be none."""
        return cut_batches(self._chunks(0), itertools.repeat(self._plan.batch_size))

    def _chunks(self, number: int) -> Iterator[Columns]:
        """Yield this rank's rows of a pass, shuffled within the bytes that are held at a time."""
        if not self._options.in_memory:
            for index, chunk in enumerate(self._gather(number, CHUNK_BYTES)):
                yield self._shuffle(chunk, number, index)
            return
        if self._kept is None:
            self._kept = next(self._gather(number, None), {})
        if self._kept:
            yield self._shuffle(self._kept, number, 0)

    def _gather(self, number: int, max_bytes: int | None) -> Iterator[Columns]:
        """Yield pieces of a pass put together; without a limit all of them."""
        held: list[Columns] = []
        for columns in self._read_ahead(number):
            held.append(columns)
            held_bytes = sum(array.nbytes for each in held for array in each.values())
            if max_bytes is not None and held_bytes >= max_bytes:
                yield join_columns(held)
                held = []
        if held:
            yield join_columns(held)

    def _shuffle(self, chunk: Columns, number: int, index: int) -> Columns:
        if not self._plan.shuffle:
            return chunk
        order = self._plan.chunk_order(number, index, len(next(iter(chunk.values()))))
        return {name: array[order] for name, array in chunk.items()}

    def _read_ahead(self, number: int) -> Iterator[Columns]:
        """Yield the pieces of a pass in order, while threads read the next ones."""
        pieces = iter(self._plan.pieces(number))
        waiting: deque[Future[Columns]] = deque()
        ahead = max(1, self._options.num_workers)
        with ThreadPoolExecutor(ahead, "reigen-parquet") as pool:
            try:
                for piece in itertools.islice(pieces, ahead):
                    waiting.append(pool.submit(self._read, number, piece))
                while waiting:
                    columns = waiting.popleft().result()
                    for piece in itertools.islice(pieces, 1):
                        waiting.append(pool.submit(self._read, number, piece))
                    yield columns
            finally:
                pool.shutdown(cancel_futures=True)

    def _read(self, number: int, piece: RowRange) -> Columns:
        group, options = self._rows.groups[piece.group], self._options
        wanted = None if options.transformation is not None else list(options.columns)
        with self._fs.open(group.path, "rb") as stream:
            table = pq.ParquetFile(stream).read_row_group(group.number, columns=wanted, use_threads=False)
        table = table.take(self._plan.group_order(number, piece.group)[piece.start : piece.stop])
        if options.transformation is not None:
            found = apply_transformation(table, options.transformation, options.removed)
        else:
            found = {name: to_array(table.column(name), name) for name in table.column_names}
        missing = [name for name in options.columns if name not in found]
        if missing:
            raise ArgumentError(f"there are no columns {missing} in {group.path}; there are {sorted(found)}")
        return {name: found[name] for name in options.columns}


def apply_transformation(table: pa.Table, transformation: Transformation, removed: Sequence[str] = ()) -> Columns:
    """Return the columns that a function makes of rows as a ``pandas.DataFrame``; vectors are arrays in it.

    Raises:
        ArgumentError: it returns something else, or another number of rows.
    """
    import pandas as pd

    usable = [name for name in table.column_names if kind_of(table.schema.field(name).type) != "other"]
    cells = {name: to_array(table.column(name), name) for name in usable}
    given = {
        name: (list(cells[name]) if cells[name].ndim > 1 else cells[name])
        if name in cells
        else table.column(name).to_pandas()
        for name in table.column_names
    }
    made = transformation(pd.DataFrame(given))
    if not isinstance(made, pd.DataFrame) or len(made) != table.num_rows:
        found = f"{len(made)} rows" if isinstance(made, pd.DataFrame) else type(made).__name__
        raise ArgumentError(
            f"transformation_fn must return a pandas.DataFrame of the {table.num_rows} rows that it got, "
            f"and gave {found}; select rows in Spark, before fit()"
        )
    return {str(name): _array_of_series(made[name], str(name)) for name in made.columns if name not in removed}


def _array_of_series(series: Any, name: str) -> NDArray[Any]:
    values = series.to_numpy()
    if values.dtype != object:
        return np.asarray(values)
    try:
        return np.stack([np.asarray(each).reshape(-1) for each in values])
    except ValueError as error:
        raise ArgumentError(f"column {name!r} has cells of different sizes after transformation_fn") from error


def to_array(column: pa.ChunkedArray, name: str) -> NDArray[Any]:
    """Return a column as an array of shape (rows,), or (rows, elements) for vectors and lists.

    Raises:
        ArgumentError: it has missing values, vectors of different sizes, or no numbers.
    """
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no chunk, or of several with more than 2 GiB
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return _numbers_of(array, name)


def _numbers_of(array: pa.Array, name: str) -> NDArray[Any]:
    if array.null_count:
        raise ArgumentError(f"column {name!r} has missing values: fill them, or leave these rows out, before fit()")
    if _is_vector(array.type):
        return _dense(array, name)
    if _is_list(array.type):
        lengths = np.asarray(pc.list_value_length(array))
        size = _common_size(lengths, name)
        values = _numbers_of(array.flatten(), name)
        return values.reshape(len(array), size * (values.shape[1] if values.ndim > 1 else 1))
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    if kind_of(array.type) not in {"int", "float"}:
        raise ArgumentError(
            f"column {name!r} is of type {array.type}, which is no number: make numbers of it before fit(), "
            "for example with StringIndexer, or with transformation_fn"
        )
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _dense(array: pa.StructArray, name: str) -> NDArray[np.float64]:
    """Return Spark ML's vectors, dense (type 1) and sparse (type 0) ones, as rows of a dense matrix."""
    fields = {each: array.field(each) for each in _VECTOR_FIELDS}
    is_dense = np.asarray(fields["type"]) == 1
    lengths = np.asarray(pc.fill_null(pc.list_value_length(fields["values"]), 0))
    sizes = np.where(is_dense, lengths, np.asarray(pc.fill_null(fields["size"], 0)))
    made = np.zeros((len(array), _common_size(sizes, name)))
    if is_dense.any():
        values = fields["values"].filter(pa.array(is_dense)).flatten()
        made[is_dense] = np.asarray(values).reshape(int(is_dense.sum()), -1)
    if not is_dense.all():
        sparse = pa.array(~is_dense)
        rows = np.repeat(np.flatnonzero(~is_dense), lengths[~is_dense])
        made[rows, np.asarray(fields["indices"].filter(sparse).flatten())] = np.asarray(
            fields["values"].filter(sparse).flatten()
        )
    return made


def _common_size(sizes: NDArray[Any], name: str) -> int:
    found = np.unique(sizes)
    if len(found) > 1:
        raise ArgumentError(f"column {name!r} has vectors of {found[0]} and of {found[-1]} elements; all must be equal")
    return int(found[0]) if len(found) else 0


def _is_vector(dtype: pa.DataType) -> bool:
    return pa.types.is_struct(dtype) and {each.name for each in dtype} == set(_VECTOR_FIELDS)


def _is_list(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Return columns put together, row after row.

    Raises:
        ArgumentError: vectors of a column differ in size.
    """
    if len(parts) == 1:
        return parts[0]
    for name in parts[0]:
        _common_size(np.array([int(np.prod(part[name].shape[1:])) for part in parts]), name)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass
class _Held:
    """Rows that wait for a batch."""

    chunks: Iterator[Columns]
    columns: Columns = field(default_factory=dict)

    def num_rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def take(self, size: int) -> Columns:
        """Remove up to ``size`` rows: fewer where no more come."""
        while self.num_rows() < size and (chunk := next(self.chunks, None)) is not None:
            self.columns = join_columns([self.columns, chunk]) if self.num_rows() else chunk
        taken = {name: array[:size] for name, array in self.columns.items()}
        self.columns = {name: array[size:] for name, array in self.columns.items()}
        return taken


def cut_batches(chunks: Iterator[Columns], sizes: Iterable[int]) -> Iterator[Columns]:
    """Yield batches of the given sizes from chunks of any; the last one may be smaller."""
    held = _Held(chunks)
    for size in sizes:
        batch = held.take(size)
        if not batch or not len(next(iter(batch.values()))):
            return
        yield batch
