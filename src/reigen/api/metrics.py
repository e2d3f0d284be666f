"""Metrics of this process, and additions of the program to them: the same for every framework."""

from __future__ import annotations

import operator

from reigen import context
from reigen.cluster.metrics import format_sample
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
