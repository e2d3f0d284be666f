"""A DataFrame's rows as Parquet files in a store."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql import types as T  # noqa: N812

from reigen.errors import ArgumentError
from reigen.spark.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

_MARK = "__reigen_validation"
_USABLE = (T.NumericType, T.BooleanType, T.ArrayType)
#: Data of DataFrames that were written before, and are still there, by the DataFrame and what was asked for.
_written: weakref.WeakKeyDictionary[DataFrame, dict[Hashable, PreparedData]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class PreparedData:
    """Rows in a store.

    Attributes:
        index: ``idx`` of the store's paths.
        has_validation: there are rows for validation.
    """

    index: str
    has_validation: bool


def check_columns(df: DataFrame, columns: Sequence[str], *, transformed: bool) -> None:
    """Check that a DataFrame has columns that can be trained on.

    Args:
        df: the DataFrame.
        columns: their names.
        transformed: a transformation makes numbers of them later.

    Raises:
        ArgumentError: some are missing, or have no numbers; all of them are named.
    """
    types = {each.name: each.dataType for each in df.schema}
    missing = [name for name in columns if name not in types]
    if missing:
        raise ArgumentError(f"the DataFrame has no columns {missing}; it has {sorted(types)}")
    wrong = [f"{name} ({types[name].simpleString()})" for name in columns if not _is_usable(types[name])]
    if wrong and not transformed:
        raise ArgumentError(
            f"columns without numbers cannot be trained on: {', '.join(wrong)}; make numbers of them before, "
            "for example with StringIndexer or VectorAssembler"
        )


def _is_usable(dtype: Any) -> bool:
    return isinstance(dtype, _USABLE) or type(dtype).__name__ == "VectorUDT"


def write_rows(
    df: DataFrame,
    store: Store,
    columns: Sequence[str],
    validation: float | str | None,
    num_partitions: int,
    seed: int,
) -> PreparedData:
    """Write columns of a DataFrame to a store, unless that was done before with the same arguments.

    The files are removed when the DataFrame is garbage-collected, or this process ends.

    Args:
        df: the DataFrame.
        store: where to.
        columns: names of the columns.
        validation: share of the rows, at random, that is for validation; or a column that is true for those; or None.
        num_partitions: files, and so row groups, of the rows for training, at least.
        seed: chooses rows at random.
    """
    kind = type(store).__name__, store.get_train_data_path(), store.get_val_data_path()
    key = (kind, tuple(columns), validation, num_partitions, seed)
    known = _written.setdefault(df, {})
    if key in known and store.exists(store.get_train_data_path(known[key].index)):
        return known[key]
    prepared = PreparedData(secrets.token_hex(6), validation is not None)
    weakref.finalize(df, _remove, store, prepared.index)
    with _mark_validation(df, validation, seed) as marked:
        train = marked if validation is None else marked.filter(~F.col(_MARK))
        parts = [(store.get_train_data_path(prepared.index), train)]
        if validation is not None:
            parts.append((store.get_val_data_path(prepared.index), marked.filter(_MARK)))
        for path, rows in parts:
            rows.select(*map(quoted, columns)).repartition(num_partitions).write.mode("overwrite").parquet(path)
    known[key] = prepared
    return prepared


@contextmanager
def _mark_validation(df: DataFrame, validation: float | str | None, seed: int) -> Iterator[DataFrame]:
    """Add a column that is true for rows for validation; rows are kept, so that both parts are of one evaluation."""
    if validation is None:
        yield df
        return
    chosen = F.col(quoted(validation)).cast("boolean") if isinstance(validation, str) else F.rand(seed) < validation
    marked = df.withColumn(_MARK, F.coalesce(chosen, F.lit(False))).persist()
    try:
        yield marked
    finally:
        marked.unpersist()


def _remove(store: Store, index: str) -> None:
    for path in (store.get_train_data_path(index), store.get_val_data_path(index)):
        store.remove(path)


def quoted(name: str) -> str:
    """Quote a column's name, in which dots would mean fields."""
    return "`" + name.replace("`", "``") + "`"
