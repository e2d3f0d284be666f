"""Places where an estimator's training processes run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle

from reigen.errors import ArgumentError


class EstimatorBackend(Protocol):
    """Interface of such a place."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function in all processes of a job, with environment variables on top; returns its results by rank."""
        ...

    def num_processes(self) -> int:
        """Return the number of processes."""
        ...


class SparkBackend:
    """Processes on Spark's executors, by `reigen.spark.run`.

    Args:
        num_proc: number of processes; by default ``spark.default.parallelism``.
        env: environment variables of the processes.
        kwargs: other arguments of `reigen.spark.run`, such as ``start_timeout`` and ``verbose``.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        if num_proc is not None and num_proc < 1:
            raise ArgumentError(f"num_proc must be at least 1, got {num_proc}")
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), kwargs

    def num_processes(self) -> int:
        """Return ``num_proc``, or Spark's default parallelism."""
        if self._num_proc is not None:
            return self._num_proc
        from pyspark.sql import SparkSession

        return int(SparkSession.builder.getOrCreate().sparkContext.defaultParallelism)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function in all processes, as `EstimatorBackend.run`; raises the errors of `reigen.spark.run`."""
        from reigen.spark import run

        packed = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
        environment = {**self._env, **(env or {})}
        size = self.num_processes()
        return run(call_packed, (packed, environment), num_proc=size, env=environment, **self._options)


class LocalBackend:
    """Processes on this host, by `reigen.run`: for data that one host can train on, and for tests.

    Args:
        num_proc: number of processes.
        env: environment variables of the processes.
        kwargs: other arguments of `reigen.run`.
    """

    def __init__(self, num_proc: int = 1, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        if num_proc < 1:
            raise ArgumentError(f"num_proc must be at least 1, got {num_proc}")
        self._num_proc, self._env, self._options = num_proc, dict(env or {}), kwargs

    def num_processes(self) -> int:
        """Return ``num_proc``."""
        return self._num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function in all processes, as `EstimatorBackend.run`; raises the errors of `reigen.run`."""
        from reigen.runner import run

        packed = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
        return run(call_packed, (packed, {**self._env, **(env or {})}), num_proc=self._num_proc, **self._options)


def call_packed(packed: bytes, environment: Mapping[str, str]) -> Any:
    """Set variables, and then load a function with its arguments, whose modules read the variables when they load."""
    os.environ.update(environment)
    fn, args, kwargs = cloudpickle.loads(packed)
    return fn(*args, **kwargs)
