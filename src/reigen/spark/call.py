"""`run`: a function in ranks that have the slots of Spark tasks; its results, by rank."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from reigen.errors import ConfigError, LaunchError, RankFailedError, UnsupportedError
from reigen.launch.elastic.options import ElasticOptions, ElasticRequest, resolve_elastic
from reigen.runner.engine_jobs import Cancellation, EngineAgents, EngineJobOptions, run_on_engine
from reigen.runner.serialization import check_call
from reigen.spark.session import (
    REPORT_SECONDS,
    SparkJob,
    TaskPlace,
    active_context,
    check_num_tasks,
    missing_slots_text,
    order_by_rank,
    security_warning,
    some_host,
    uses_barrier,
    wait_for_slots,
)
from reigen.spark.task import run_task

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Seconds to wait for slots, where neither the caller nor the environment names others.
START_TIMEOUT_SECONDS = 600.0
START_TIMEOUT_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"
#: Seconds that agents may take to come when Spark has started their tasks.
_AGENT_SECONDS = 30.0
_POLL_SECONDS = 0.5
#: Seconds in which a lost executor is noticed by its agent's connection, which says which ranks are lost.
_LOSS_SECONDS = 1.5
#: Seconds that the tasks of an elastic job may take to end by themselves.
_END_SECONDS = 2.0
#: Contexts whose unencrypted connections the user has been warned about, by application.
_warned: set[str] = set()


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    num_servers: int = 0,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` processes on Spark's executors that form a job.

    One Spark job of ``num_proc`` tasks holds the slots, all at once (a barrier stage, but not where Spark allocates
    executors dynamically). The ranks are children of an agent in the first task of each host: ranks of one host are
    neighbours, and rank 0 is on the host of task 0. They have their task's environment and working directory, and the
    executor's Python. May be called from any thread of the driver.

    Args:
        fn: the function, which calls ``init()`` itself. It is pickled by cloudpickle.
        args: its arguments, the same in all ranks.
        kwargs: its keyword arguments.
        num_proc: the number of ranks, by default ``spark.default.parallelism``.
        start_timeout: seconds to wait for that many slots, by default HOROVOD_SPARK_START_TIMEOUT, or 600.
        use_mpi: not possible: the ranks are no processes of MPI's.
        use_gloo: no effect.
        extra_mpi_args: no effect.
        env: variables for all ranks, above those of the tasks.
        stdout: where the ranks' output goes on the driver, by default ``sys.stdout``; a text stream.
        stderr: the same for what they write to stderr.
        verbose: 2 and more: report which processes are started, and where.
        nics: interfaces through which hosts may talk to each other: ``"eth0,eth1"``, or a list.
        prefix_output_with_timestamp: write the time before each line of output.
        executable: the Python to run, with Reigen installed; by default that of the executors.
        num_servers: parameter servers, which run beside the ranks, on their hosts in turn; Spark counts no slots for
            them. Their scheduler runs beside the driver.

    Returns:
        The values that the function returned, by rank.

    Raises:
        RankFailedError: a rank raised, exited, was killed, or lost its executor: the first one that failed by itself.
            Its ``__cause__`` is the exception of that rank, where it can be loaded here. The others were stopped.
        TimeoutError: Spark has not had the slots within ``start_timeout``.
        RuntimeError: there is no active SparkContext.
        ConfigError: (a ValueError) an argument makes no sense.
        UnsupportedTypeError: ``fn`` or an argument cannot be pickled.
        LaunchError: the tasks cannot start agents, or Spark has ended the job: it was cancelled, for example.

    Example::

        def train(learning_rate):
            import reigen.torch as hvd

            hvd.init()
            ...
            return loss

        losses = reigen.spark.run(train, args=(0.1,), num_proc=4)
    """
    if use_mpi:
        raise ConfigError("use_mpi: Reigen's ranks in Spark are no processes of MPI's; leave it out")
    context = active_context()
    call = check_call(fn, args, kwargs)
    size = check_num_tasks(num_proc, context.defaultParallelism)
    warn_without_effect(extra_mpi_args=extra_mpi_args)
    request = SparkRequest(
        num_tasks=size,
        start_timeout_seconds=resolve_start_timeout(start_timeout, os.environ),
        options=EngineJobOptions(
            num_ranks=size,
            environ=check_environ(env),
            verbose=verbose >= 2,
            timestamps=prefix_output_with_timestamp,
            network_interfaces=nics if nics is None or isinstance(nics, str) else ",".join(nics),
            stdout=stdout,
            stderr=stderr,
            num_servers=num_servers,
        ),
        executable=executable,
    )
    return run_in_tasks(context, call, request)


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` in an elastic job on Spark's executors.

    The loop of ``fn`` is in a function that ``elastic.run`` decorates. Ranks that die, or whose executor does, are
    replaced, and the others go on while there are ``min_num_proc``. A Spark job of ``max_num_proc`` tasks holds the
    slots. They are no barrier stage, which would begin with all or none, and end with the first failure: Spark starts
    as many as it has slots for, the others when there are more, and a task that has failed anew, up to
    ``spark.task.maxFailures`` times. Then Spark ends the job.

    Args:
        fn: the function.
        args: its arguments, the same in all ranks.
        kwargs: its keyword arguments.
        num_proc: the default of both bounds; its own is ``spark.default.parallelism``, within those that are given.
        min_num_proc: the least number of ranks.
        max_num_proc: the greatest.
        start_timeout: seconds to wait for ``min_num_proc`` slots, as in `run`.
        elastic_timeout: seconds that there may be fewer than ``min_num_proc`` ranks later, by default 600.
        reset_limit: how many changes because of failures the job survives.
        env: as in `run`, as all that follow.
        stdout: as in `run`.
        stderr: as in `run`.
        verbose: as in `run`.
        nics: as in `run`.
        prefix_output_with_timestamp: as in `run`.

    Returns:
        The values that the function returned in the last view's ranks, by rank.

    Raises:
        RankFailedError: no rank is left: the one that failed first since the last change.
        TimeoutError: Spark has not had ``min_num_proc`` slots within ``start_timeout``.
        RuntimeError: there is no active SparkContext.
        ConfigError: (a ValueError) an argument makes no sense; ``min_num_proc`` is greater than ``max_num_proc``.
        UnsupportedError: (a NotImplementedError) Spark gives GPUs to its tasks.
        UnsupportedTypeError: ``fn`` or an argument cannot be pickled.
        LaunchError: there were fewer than ``min_num_proc`` ranks for too long, or Spark has ended the job.
    """
    context = active_context()
    call = check_call(fn, args, kwargs)
    least, most = check_num_tasks(min_num_proc, 1), check_num_tasks(max_num_proc, 1 << 16)
    size = check_num_tasks(num_proc, max(least, min(most, context.defaultParallelism)))
    seconds = resolve_start_timeout(start_timeout, os.environ)
    elastic = resolve_bounds(size, min_num_proc, max_num_proc, (seconds, elastic_timeout), reset_limit)
    if context.getConf().get("spark.task.resource.gpu.amount"):
        raise UnsupportedError(
            "run_elastic: Spark gives GPUs to its tasks (spark.task.resource.gpu.amount), which come and go, and ranks "
            "cannot have those of another task: leave it out, and choose by local_rank()"
        )
    request = SparkRequest(
        num_tasks=elastic.max_ranks,
        start_timeout_seconds=seconds,
        options=EngineJobOptions(
            environ=check_environ(env),
            verbose=verbose >= 2,
            timestamps=prefix_output_with_timestamp,
            network_interfaces=nics if nics is None or isinstance(nics, str) else ",".join(nics),
            stdout=stdout,
            stderr=stderr,
            elastic=elastic,
        ),
    )
    return run_in_tasks(context, call, request)


def resolve_bounds(
    size: int,
    min_num_proc: int | None,
    max_num_proc: int | None,
    timeouts: tuple[float, float | None],
    reset_limit: int | None,
) -> ElasticOptions:
    """Return the options of an elastic job.

    Args:
        size: ``num_proc``.
        min_num_proc: the least number of ranks; None: ``size``.
        max_num_proc: the greatest; None: ``size``.
        timeouts: seconds for the start, and for later.
        reset_limit: see `run_elastic`.

    Raises:
        ConfigError: they make no sense.
    """
    least, most = check_num_tasks(min_num_proc, size), check_num_tasks(max_num_proc, size)
    if least > most:
        raise ConfigError(f"min_num_proc is {least}, which is more than max_num_proc, {most}")
    if not least <= size <= most:
        raise ConfigError(f"num_proc is {size}, which is not between min_num_proc, {least}, and max_num_proc, {most}")
    elastic = resolve_elastic(
        ElasticRequest(
            min_ranks=least,
            max_ranks=most,
            start_timeout_seconds=timeouts[0],
            timeout_seconds=timeouts[1],
            reset_limit=reset_limit,
            names=("num_proc", "min_num_proc", "max_num_proc", "cooldown_range"),
        )
    )
    assert elastic is not None, "it has bounds"
    return elastic


@dataclass(frozen=True, slots=True)
class SparkRequest:
    """Tasks that a job asks Spark for.

    Attributes:
        num_tasks: number of tasks, with as many ranks each as there are GPUs, or one.
        start_timeout_seconds: for Spark to start them.
        options: of the job.
        executable: the ranks' Python, or None.
        ranks_per_task: slots in each task.
    """

    num_tasks: int
    start_timeout_seconds: float
    options: EngineJobOptions
    executable: str | None = None
    ranks_per_task: int = 1

    @property
    def num_needed(self) -> int:
        """Number of tasks without which the job does not begin."""
        return self.num_tasks if self.options.elastic is None else self.options.elastic.min_ranks


def run_in_tasks(
    context: SparkContext, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], request: SparkRequest
) -> list[Any]:
    """Run a function in a Spark job's tasks; see `run` for the errors."""
    warn_about_security(context, request.num_tasks)
    deadline = time.monotonic() + request.start_timeout_seconds
    is_barrier = request.options.elastic is None and uses_barrier(dict(context.getConf().getAll()))
    if is_barrier:  # else there are no executors before there are tasks
        wait_for_slots(context, request.num_tasks, deadline, partial(_report, request.options))
    cancellation = Cancellation()
    func, args, kwargs = call
    description = f"reigen: {getattr(func, '__name__', 'a function')} in {request.num_tasks} tasks"
    on_failed = partial(_cancel_late, cancellation)
    with SparkJob(context, request.num_tasks, description, on_failed, is_barrier=is_barrier) as job:
        watch = StartWatch(job, request, deadline, cancellation)
        try:
            results = run_on_engine(
                func,
                args,
                kwargs,
                agents=_agents(context, job, watch, request),
                options=replace(request.options, start_timeout_seconds=request.start_timeout_seconds + _AGENT_SECONDS),
                cancellation=cancellation,
            )
            if request.options.elastic is not None and not job.wait_for_end(_END_SECONDS):
                job.cancel()  # tasks for which there was never a slot
            return results
        except RankFailedError as error:
            if request.options.elastic is not None:  # what is called a rank is a slot, of whatever task
                raise
            raise _with_place(error, order_by_rank(job.list_tasks(), request.ranks_per_task)) from error.__cause__
        except LaunchError as error:
            if watch.problem:
                raise TimeoutError(watch.problem) from None
            if job.failure:
                raise LaunchError(f"Spark has ended the job: {job.failure}", error.exit_code) from None
            raise
        finally:
            watch.stop()


def _agents(context: SparkContext, job: SparkJob, watch: StartWatch, request: SparkRequest) -> EngineAgents:
    def start_agents(inputs: Mapping[str, str]) -> None:
        texts = [inputs[str(number)] for number in range(len(inputs))]
        step = request.ranks_per_task
        job.start(run_task, [texts[first : first + step] for first in range(0, len(texts), step)])
        watch.start()

    return EngineAgents(
        engine="Spark",
        hosts=request.options.num_ranks or request.num_tasks,
        start_agents=start_agents,
        explain_exit=lambda name: job.explain_task(int(name) // request.ranks_per_task),
        kept_variables=("",),
        exports_environ=False,
        listen_towards=some_host(context),
        python=request.executable,
    )


class StartWatch:
    """Thread that reports how many tasks Spark has started, and cancels the job where they are too few for too long.

    Attributes:
        problem: that they were too few at the deadline; else empty.
    """

    def __init__(self, job: SparkJob, request: SparkRequest, deadline: float, cancellation: Cancellation) -> None:
        self.problem = ""
        self._job, self._request, self._deadline, self._cancellation = job, request, deadline, cancellation
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{job.group}.start", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        num_tasks, next_report = self._request.num_needed, time.monotonic() + REPORT_SECONDS
        while not self._stopped.wait(_POLL_SECONDS) and (running := self._job.count_running()) < num_tasks:
            now = time.monotonic()
            if now >= self._deadline:
                self.problem = missing_slots_text(running, num_tasks)
                self._cancellation.cancel(self.problem)
                return
            if now >= next_report:
                _report(self._request.options, f"Spark has {running} of {num_tasks} slots free for this job")
                next_report += REPORT_SECONDS


def _cancel_late(cancellation: Cancellation, reason: str) -> None:
    """Cancel a job that Spark has ended; a lost executor is first left to its agent's connection."""
    if "cancelled" not in reason:
        time.sleep(_LOSS_SECONDS)
    cancellation.cancel(f"Spark has ended the job: {reason}")


def _with_place(error: RankFailedError, places: Sequence[TaskPlace]) -> RankFailedError:
    """Return the error with the rank's host and executor in its first line."""
    if not 0 <= error.rank < len(places):
        return error
    place = places[error.rank]
    first, newline, rest = str(error).partition("\n")
    text = f"{first} (Spark executor {place.executor} on {place.host}){newline}{rest}"
    return RankFailedError(
        text, error.exit_code, rank=error.rank, signum=error.signum, traceback=error.traceback, host=error.host
    )


def _report(options: EngineJobOptions, text: str) -> None:
    stream = options.stderr or sys.stderr
    stream.write(f"reigen.spark: {text}\n")
    stream.flush()


def warn_about_security(context: SparkContext, num_tasks: int) -> None:
    """Warn once for an application whose tasks others can read on their way to executors."""
    text = security_warning(dict(context.getConf().getAll()), context.master or "")
    if text and num_tasks > 1 and context.applicationId not in _warned:
        _warned.add(context.applicationId)
        warnings.warn(f"reigen.spark: {text}", RuntimeWarning, stacklevel=4)


def warn_without_effect(**arguments: object) -> None:
    """Warn about arguments that are accepted for the sake of existing calls."""
    if given := [name for name, value in arguments.items() if value is not None]:
        warnings.warn(f"reigen.spark: no effect: {', '.join(given)}", stacklevel=3)


def resolve_start_timeout(start_timeout: float | None, environ: Mapping[str, str]) -> float:
    """Return the seconds to wait for slots; raise ConfigError for another value."""
    value: object = start_timeout
    if value is None:
        value = environ.get(START_TIMEOUT_VARIABLE) or START_TIMEOUT_SECONDS
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(f"start_timeout must be a number of seconds greater than 0, not {value!r}")
    return seconds


def check_environ(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables for all ranks; raise ConfigError where a name or value is no text."""
    for name, text in (env or {}).items():
        if not isinstance(name, str) or not isinstance(text, str) or not name or "=" in name:
            raise ConfigError(f"env must have names and texts, not {name!r}: {text!r}")
    return dict(env or {})
