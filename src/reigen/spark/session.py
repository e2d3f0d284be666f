"""Spark's side of a job: the session, its slots, and the Spark job whose tasks hold them."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from reigen.errors import ConfigError

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Seconds between two reports of slots that are missing.
REPORT_SECONDS = 30.0
_POLL_SECONDS = 0.25
#: Seconds that tasks may take to end when their agents have; then the Spark job is cancelled.
_LAST_SECONDS = 10.0
#: Words of Spark's around the reason.
_PREAMBLES = re.compile(
    r"^.*Most recent failure reason: |\[PYTHON_EXCEPTION\] An exception was thrown from the Python worker: "
    r"|Traceback \(most recent call last\): *| SQLSTATE: \w+$"
)
_run_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Task of a Spark job: its partition, where it is, and the reason why it failed, or an empty text."""

    partition: int
    host: str
    executor: str
    problem: str = ""


def active_context() -> SparkContext:
    """Return the Spark context of this process.

    Raises:
        RuntimeError: there is none, or pyspark is not installed, or the session is one of Spark Connect.
    """
    try:
        from pyspark import SparkContext
    except ImportError as error:
        raise RuntimeError(f"reigen.spark needs pyspark: pip install 'reigen[spark]' ({error})") from error
    context = SparkContext._active_spark_context  # getOrCreate() would start one
    if context is not None:
        return context
    if _is_connect_session():
        raise RuntimeError(
            "This is a session of Spark Connect, whose driver is another process: reigen.spark.run needs a "
            "SparkContext in this one. Start the program by spark-submit, or with SparkSession.builder.master(...)"
        )
    raise RuntimeError("Could not find an active SparkContext, are you running in a PySpark session?")


def _is_connect_session() -> bool:
    with suppress(Exception):  # older versions have none, others need grpc
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        return session is not None and "connect" in type(session).__module__
    with suppress(Exception):
        from pyspark.sql.utils import is_remote

        return bool(is_remote())
    return False


def count_slots(context: SparkContext) -> int:
    """Return how many tasks the executors that have registered can run at the same time, busy slots too."""
    scala = context._jsc.sc()  # pyspark does not have it
    try:
        return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
    except Exception:  # noqa: BLE001  py4j raises what it likes where a version of Spark does not have this
        return int(context.defaultParallelism)


def wait_for_slots(context: SparkContext, num_tasks: int, deadline: float, report: Callable[[str], None]) -> None:
    """Wait until executors with so many slots have registered; without that, a barrier stage begins 15 s late.

    Raises:
        TimeoutError: they have not at the ``deadline``, by ``time.monotonic()``.
    """
    next_report = time.monotonic() + REPORT_SECONDS
    while (slots := count_slots(context)) < num_tasks:
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(missing_slots_text(slots, num_tasks))
        if now >= next_report:
            report(f"Spark has {slots} of {num_tasks} slots")
            next_report += REPORT_SECONDS
        time.sleep(min(_POLL_SECONDS, max(0.0, deadline - now)))


def missing_slots_text(num_slots: int, num_tasks: int) -> str:
    """Describe that Spark gives too few slots, and what can be done."""
    return (
        f"Spark has {num_slots} of {num_tasks} slots for reigen.spark.run: ask for fewer ranks (num_proc), for more "
        "cores (spark.cores.max, spark.executor.instances), or wait longer for them (start_timeout)"
    )


def some_host(context: SparkContext) -> str:
    """Return the name or address of some executor's host; that of the driver's where there is no other."""
    own = context.getConf().get("spark.driver.host") or ""
    with suppress(Exception):  # this version of Spark has another interface
        known = context._jsc.sc().getExecutorMemoryStatus().keysIterator()  # pyspark does not have it
        hosts = []
        while known.hasNext():
            hosts.append(str(known.next()).rpartition(":")[0].strip("[]"))
        return next((host for host in hosts if host != own), own)
    return own


def uses_barrier(conf: Mapping[str, str]) -> bool:
    """Return whether the tasks can be a barrier stage, all or none at a time; not with dynamic allocation."""
    return conf.get("spark.dynamicAllocation.enabled", "false").lower() != "true"


def security_warning(conf: Mapping[str, str], master: str) -> str:
    """Return a warning about tickets that others can read on their way to the executors, or an empty text."""
    is_private = conf.get("spark.network.crypto.enabled", "false").lower() == "true"
    is_private |= conf.get("spark.ssl.rpc.enabled", "false").lower() == "true"
    is_proven = conf.get("spark.authenticate", "false").lower() == "true"
    if (is_private and is_proven) or master.startswith("local"):
        return ""
    return (
        "Spark sends its tasks to the executors unencrypted: who can read that network could take a rank's place "
        "while the job starts (set spark.authenticate and spark.network.crypto.enabled)"
    )


class SparkJob:
    """Spark job whose tasks hold the slots. A context manager: when it ends, the Spark job has.

    Args:
        context: Spark's.
        size: number of tasks.
        description: for Spark's web page.
        on_failed: called with the reason, in a thread of its own, when Spark ends the job.
        is_barrier: all tasks run, or none; else Spark starts those that it has slots for, and failed ones again.

    Attributes:
        group: the job group's name.
        failure: why Spark has ended the job; empty where it has not, or in good order.
    """

    def __init__(
        self,
        context: SparkContext,
        size: int,
        description: str,
        on_failed: Callable[[str], None],
        *,
        is_barrier: bool = True,
    ) -> None:
        self.group = f"reigen.run.{next(_run_numbers)}"
        self.failure = ""
        self._context, self._size, self._description, self._on_failed = context, size, description, on_failed
        self._is_barrier = is_barrier
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        #: The job is being ended by its owner: its failure is no news.
        self._is_closing = False
        #: Latest list of tasks, and when it is out of date.
        self._places: dict[int, TaskPlace] = {}
        self._listed_until = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()  # an agent that has not come yet would go on trying
        self.close()

    def start(self, function: Callable[[Iterable[Any]], Iterator[Any]], inputs: Sequence[Any]) -> None:
        """Start the tasks, each with one of the inputs, and return at once."""
        from pyspark import InheritableThread

        data = self._context.parallelize(inputs, self._size)

        def run() -> None:
            try:
                self._context.setJobGroup(self.group, self._description, interruptOnCancel=True)
                tasks = data.barrier().mapPartitions(function) if self._is_barrier else data.mapPartitions(function)
                tasks.collect()
            except BaseException as error:  # noqa: BLE001  py4j's errors, and those of a driver that ends
                self.failure = describe_spark_error(str(error))
            finally:
                self._ended.set()
            if self.failure and not self._is_closing:
                self._on_failed(self.failure)

        self._thread = InheritableThread(target=run, name=self.group, daemon=True)
        self._thread.start()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the Spark job has ended, at most so long; return whether it has."""
        return self._ended.wait(seconds)

    def list_tasks(self) -> list[TaskPlace]:
        """List the tasks that Spark has started, by partition; the latest attempt of each."""
        places: dict[int, TaskPlace] = {}
        with suppress(Exception):  # the session ends, or this version of Spark has another interface
            store = self._context._jsc.sc().statusStore()  # pyspark does not have it
            for stage in self._stages():
                tasks = store.taskList(stage, 0, self._size)
                for task in (tasks.apply(number) for number in range(tasks.size())):
                    problem = task.errorMessage()
                    words = describe_spark_error(problem.get()) if problem.isDefined() else ""
                    places[task.index()] = TaskPlace(task.index(), task.host(), task.executorId(), words)
        return [places[partition] for partition in sorted(places)]

    def explain_task(self, partition: int) -> str:
        """Explain why a task has ended, by what Spark knows now; empty where it runs, or waits."""
        if self.failure:
            return self.failure
        if time.monotonic() >= self._listed_until:
            self._places = {place.partition: place for place in self.list_tasks()}
            self._listed_until = time.monotonic() + _POLL_SECONDS
        place = self._places.get(partition)
        return "" if place is None or not place.problem else f"{place.problem} (executor {place.executor})"

    def count_running(self) -> int:
        """Return how many tasks run now."""
        with suppress(Exception):
            tracker = self._context.statusTracker()
            stages = (tracker.getStageInfo(stage) for stage in self._stages())
            return sum(stage.numActiveTasks for stage in stages if stage is not None)
        return 0

    def close(self) -> None:
        """Wait until the tasks have ended, and cancel those that have not; may be called again."""
        self._is_closing = True
        if self._thread is None:
            return
        if not self._ended.wait(_LAST_SECONDS):
            self.cancel()
            self._ended.wait(_LAST_SECONDS)

    def cancel(self) -> None:
        """Have Spark kill the tasks."""
        self._is_closing = True
        if self._thread is not None and not self._ended.is_set():
            with suppress(Exception):  # the session has ended, and its tasks with it
                self._context.cancelJobGroup(self.group)

    def _stages(self) -> list[int]:
        tracker = self._context.statusTracker()
        jobs = (tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.group))
        return [stage for job in jobs if job is not None for stage in job.stageIds]


def order_by_rank(places: Sequence[TaskPlace], ranks_per_task: int = 1) -> list[TaskPlace]:
    """Return the task of each rank: in blocks by host, in the order of the hosts' lowest tasks."""
    first: dict[str, int] = {}
    for place in places:
        first.setdefault(place.host, place.partition)
    ordered = sorted(places, key=lambda place: (first[place.host], place.partition))
    return [place for place in ordered for _ in range(ranks_per_task)]


def describe_spark_error(text: str) -> str:
    """Shorten an error of Spark's to the lines that say something: no frames of Java or Python, no words of py4j's."""
    # frames of Java and of Python are indented
    lines = [line.removeprefix(": ").rstrip() for line in text.splitlines() if line and not line[0].isspace()]
    dull = ("An error occurred while calling", "Traceback (most", "Driver stacktrace")
    useful = [line for line in lines if line and not line.startswith(dull)]
    text = _PREAMBLES.sub("", " ".join(useful)) or "Spark does not say why"
    return text if len(text) <= 1000 else f"{text[:700]} ... {text[-290:]}"


def check_num_tasks(num_proc: object, default: int) -> int:
    """Return the number of ranks, by default Spark's parallelism; raise ConfigError for another value."""
    if num_proc is None:
        return default
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ConfigError(f"num_proc must be a number of ranks, at least 1, not {num_proc!r}")
    return num_proc
