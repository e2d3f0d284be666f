"""Metrics of this process, and additions of the program to them: the same for every framework."""

from __future__ import annotations

import operator
from collections.abc import Callable

from reigen import context
from reigen.cluster.metrics import MetricSample, format_sample
from reigen.errors import ArgumentError
from reigen.observe.metrics import collect_samples

#: What a program may report at once: the largest number up to which a float has all whole ones.
_MOST = 1 << 53


def metrics() -> dict[str, float]:
    """Return the metrics of this process: its work in the job, in numbers (docs/metrics.md has the table).

    Counters grow from ``init()`` on, in an elastic job over all views. Any thread may call it, at any time; it waits
    for nobody, and other ranks do not notice.

    Returns:
        Numbers by name, as Prometheus writes it: ``reigen_steps_total``,
        ``reigen_bytes_total{operation="allreduce",way="shared_memory"}``. What has never happened may be missing.

    Raises:
        NotInitializedError: ``init()`` has not been called.

    Example:
        >>> import reigen
        >>> reigen.init()
        >>> reigen.metrics()["reigen_ranks"]
        1
        >>> reigen.shutdown()
    """
    return {format_sample(sample): sample[2] for sample in collect_samples(context.current())}


def report_progress(*, samples: int = 0, steps: int = 0, goal_steps: int | None = None) -> None:
    """Report the training's progress on this rank, for the metrics.

    Args:
        samples: so many more samples were trained on.
        steps: so many more steps have ended, where no optimizer of Reigen's counts them: with `reigen.torch` and
            `reigen.mxnet`, and in a ``Job``, they are counted. In a timeline, a STEP ends on the calling thread.
        goal_steps: after how many steps in all the training is over.

    Raises:
        ArgumentError: a number is negative, or no whole one.
        NotInitializedError: ``init()`` has not been called.
    """
    try:
        samples, steps = operator.index(samples), operator.index(steps)
        goal_steps = goal_steps if goal_steps is None else operator.index(goal_steps)
    except TypeError:
        raise ArgumentError("report_progress() takes whole numbers") from None
    if not all(0 <= number <= _MOST for number in (samples, steps, goal_steps or 0)):
        raise ArgumentError(f"report_progress() takes numbers from 0 to {_MOST}")
    counters = context.current().counters
    counters.samples += samples
    if steps:
        counters.steps += steps - 1
        context.mark("STEP")
    if goal_steps is not None:
        counters.goal_steps = goal_steps


class MetricsLogger:
    """Hand the metrics of rank 0 to any logger, every so many steps; call it once a step, on all ranks or on rank 0.

    Names are paths, which TensorBoard, W&B and MLflow all take: ``reigen/bytes_total/allreduce/shared_memory``.

    Args:
        log: called with the metrics, a dict of floats by name, and the step's number.
        every: steps from one call of ``log`` to the next.

    Raises:
        ArgumentError: ``every`` is not a positive whole number.

    Example:
        >>> import reigen
        >>> reigen.init()
        >>> written = []
        >>> logger = MetricsLogger(lambda values, step: written.append((step, values["reigen/ranks"])), every=2)
        >>> for _ in range(4):
        ...     logger()
        >>> written
        [(2, 1.0), (4, 1.0)]
        >>> reigen.shutdown()
    """

    def __init__(self, log: Callable[[dict[str, float], int], object], every: int = 100) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ArgumentError(f"every must be a positive whole number, got {every!r}")
        self._log, self._every = log, every
        self._step: int | None = None

    def __call__(self, step: int | None = None) -> None:
        """Count a step, and log if it is one of those to be logged, or steps before it that were not named were.

        Args:
            step: its number; without, the calls are counted from 1. A number that comes again, as in every batch of an
                accumulation, is logged once.

        Raises:
            NotInitializedError: ``init()`` has not been called.
        """
        last = self._step
        self._step = (last or 0) + 1 if step is None else step
        last = self._step - 1 if last is None else last
        current = context.current()
        if current.rank == 0 and self._step // self._every > last // self._every:
            self._log({_path(sample): float(sample[2]) for sample in collect_samples(current)}, self._step)


def _path(sample: MetricSample) -> str:
    name, labels, _ = sample
    return "/".join(["reigen", name.removeprefix("reigen_"), *labels])
