"""Spark within this host, and rank processes that tests of estimators share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import pytest

from reigen.spark.estimator_backend import call_packed
from reigen.testing import RankPool


@contextmanager
def local_session() -> Iterator[Any]:
    """A session of two threads, whose tasks have this Python."""
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        for name, value in (("spark.sql.shuffle.partitions", "2"), ("spark.driver.host", "127.0.0.1")):
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        yield session
        session.stop()


class PoolBackend:
    """A backend of ranks that tests share, so that a framework is imported once."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def num_processes(self) -> int:
        return self._pool.size

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        packed = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
        return self._pool.run(call_packed, packed, dict(env or {}), timeout=170)
