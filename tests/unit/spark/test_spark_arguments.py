"""Arguments of `reigen.spark.run` and `run_elastic`, Spark's answers: what is decided without Spark."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from reigen.errors import ConfigError
from reigen.spark import Distributor, call, session
from reigen.spark.distributor import run_script
from reigen.spark.session import TaskPlace


@pytest.mark.parametrize("num_proc", [0, -1, 2.0, "2", True])
def test_a_number_of_ranks_that_is_none(num_proc: object) -> None:
    with pytest.raises(ConfigError, match=r"num_proc must be a number of ranks, at least 1"):
        session.check_num_tasks(num_proc, 4)


def test_the_number_of_ranks_is_by_default_sparks_parallelism() -> None:
    assert session.check_num_tasks(None, 4) == 4
    assert session.check_num_tasks(3, 4) == 3


def test_elastic_bounds() -> None:
    options = call.resolve_bounds(3, 2, 4, (5.0, 7.0), 1)
    assert (options.min_ranks, options.max_ranks, options.reset_limit) == (2, 4, 1)
    assert (options.start_timeout_seconds, options.timeout_seconds) == (5.0, 7.0)
    options = call.resolve_bounds(3, None, None, (5.0, None), None)
    assert (options.min_ranks, options.max_ranks, options.timeout_seconds) == (3, 3, 600.0)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((3, 4, 2), "min_num_proc is 4, which is more than max_num_proc, 2"),
        ((5, 1, 4), "num_proc is 5, which is not between"),
    ],
)
def test_elastic_bounds_that_cannot_be(bounds: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call.resolve_bounds(*bounds, (5.0, None), None)


@pytest.mark.parametrize(
    ("given", "environ", "seconds"),
    [
        (None, {}, 600.0),
        (None, {"HOROVOD_SPARK_START_TIMEOUT": "20"}, 20.0),
        (5, {"HOROVOD_SPARK_START_TIMEOUT": "1"}, 5),
    ],
)
def test_the_start_timeout(given: float | None, environ: dict[str, str], seconds: float) -> None:
    assert call.resolve_start_timeout(given, environ) == seconds


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_start_timeout_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match="start_timeout must be a number of seconds"):
        call.resolve_start_timeout(None, {"HOROVOD_SPARK_START_TIMEOUT": value})


@pytest.mark.parametrize("env", [{"A": 1}, {1: "a"}, {"": "a"}, {"A=B": "c"}])
def test_variables_that_are_none(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="env must have names and texts"):
        call.check_environ(env)


@pytest.mark.parametrize(
    ("conf", "master", "warned"),
    [
        ({}, "spark://h1:7077", True),
        ({}, "local[4]", False),
        ({"spark.authenticate": "true"}, "spark://h1:7077", True),
        ({"spark.authenticate": "true", "spark.network.crypto.enabled": "TRUE"}, "yarn", False),
        ({"spark.authenticate": "true", "spark.ssl.rpc.enabled": "true"}, "yarn", False),
    ],
)
def test_the_warning_about_unencrypted_tasks(conf: dict[str, str], master: str, warned: bool) -> None:
    assert bool(session.security_warning(conf, master)) is warned


def test_dynamic_allocation_has_no_barrier() -> None:
    assert session.uses_barrier({})
    assert session.uses_barrier({"spark.dynamicAllocation.enabled": "false"})
    assert not session.uses_barrier({"spark.dynamicAllocation.enabled": "true"})


def test_tasks_in_the_order_of_ranks() -> None:
    places = [TaskPlace(number, host, f"of {host}") for number, host in enumerate(["h2", "h1", "h2", "h3", "h1"])]
    ordered = session.order_by_rank(places)
    assert [(place.host, place.partition) for place in ordered] == [
        ("h2", 0),
        ("h2", 2),
        ("h1", 1),
        ("h1", 4),
        ("h3", 3),
    ]
    assert [place.partition for place in session.order_by_rank(places[:2], 2)] == [0, 0, 1, 1]


def test_an_error_of_sparks_in_a_few_words() -> None:
    text = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job 3 cancelled part of cancelled job group reigen.run.1
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2856)
\t... 12 more
ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: worker lost
Driver stacktrace:
\tat org.apache.spark.scheduler"""
    words = session.describe_spark_error(text)
    assert words.startswith("org.apache.spark.SparkException: Job 3 cancelled part of cancelled job group")
    assert "ExecutorLostFailure (executor 1 exited" in words
    assert "DAGScheduler" not in words
    assert len(session.describe_spark_error("word " * 5000)) < 1100
    assert session.describe_spark_error("\n") == "Spark does not say why"


class Context:
    """A Spark context with these numbers of slots, one after the other."""

    defaultParallelism = 1  # noqa: N815  Spark's

    def __init__(self, *slots: int) -> None:
        self._slots = list(slots)

    @property
    def _jsc(self) -> Context:
        return self

    def sc(self) -> Context:
        return self

    def resourceProfileManager(self) -> Context:  # noqa: N802  Spark's
        return self

    def defaultResourceProfile(self) -> Context:  # noqa: N802  Spark's
        return self

    def maxNumConcurrentTasks(self, _: object) -> int:  # noqa: N802  Spark's
        return self._slots.pop(0) if len(self._slots) > 1 else self._slots[0]


def test_waiting_for_slots_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REPORT_SECONDS", 0.0)
    reports: list[str] = []
    session.wait_for_slots(Context(0, 2, 4), 4, time.monotonic() + 60, reports.append)  # type: ignore[arg-type]
    assert reports == ["Spark has 0 of 4 slots", "Spark has 2 of 4 slots"]


def test_slots_that_are_not_there_in_time() -> None:
    with pytest.raises(TimeoutError, match=r"Spark has 2 of 4 slots.*num_proc.*start_timeout"):
        session.wait_for_slots(Context(2), 4, time.monotonic(), lambda text: None)  # type: ignore[arg-type]


def test_without_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(RuntimeError, match=r"pip install 'reigen\[spark\]'"):
        call.run(len)


@pytest.mark.parametrize(
    ("of_connect", "words"), [(False, "Could not find an active SparkContext"), (True, "a session of Spark Connect")]
)
def test_without_a_context(monkeypatch: pytest.MonkeyPatch, of_connect: bool, words: str) -> None:
    session_type = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session" if of_connect else "x"})
    session_type.getActiveSession = staticmethod(session_type)  # type: ignore[attr-defined]
    fake = ModuleType("pyspark")
    fake.SparkContext = type("SparkContext", (), {"_active_spark_context": None})  # type: ignore[attr-defined]
    sql = ModuleType("pyspark.sql")
    sql.SparkSession = session_type  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", fake)
    monkeypatch.setitem(sys.modules, "pyspark.sql", sql)
    for function in (call.run, call.run_elastic, Distributor):
        with pytest.raises(RuntimeError, match=words):
            function(2)  # type: ignore[operator]


def test_a_script_ends_as_a_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["here"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(__name__ + sys.path[0]); sys.exit(int(sys.argv[2]))"
    )
    run_script(str(script), str(tmp_path / "out"), "0")
    assert (tmp_path / "out").read_text() == f"__main__{tmp_path}"
    with pytest.raises(SystemExit, match="3"):
        run_script(str(script), str(tmp_path / "out"), "3")
