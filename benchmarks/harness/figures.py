"""From begins and ends to medians, spreads and ratios: pure arithmetic.

A round gives each mode a turn of several operations. What other users of the machine do changes from second to second,
so the figure of a mode is the median over rounds of the round's median, and ratios compare modes that had turns in the
same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

#: Begin and end of each operation of one rank, in seconds of a clock that all ranks share.
Timeline = Sequence[tuple[float, float]]


class Summary(msgspec.Struct, frozen=True):
    """What one mode took, in seconds.

    Attributes:
        median: median over rounds of the round's median.
        p10: the 10th percentile of all operations.
        p90: the 90th percentile of all operations.
        rounds: the median of each round, in order.
        num_operations: how many operations were timed.
    """

    median: float
    p10: float
    p90: float
    rounds: tuple[float, ...]
    num_operations: int

    @property
    def noise(self) -> float:
        """How far the medians of rounds lie apart: 90th minus 10th percentile, in seconds."""
        low, high = np.quantile(self.rounds, (0.1, 0.9))
        return float(high - low)


class Ratio(msgspec.Struct, frozen=True):
    """One figure divided by another.

    Attributes:
        value: quotient of the two medians.
        low: the smallest quotient of a round.
        high: the largest.
    """

    value: float
    low: float
    high: float


class Overhead(msgspec.Struct, frozen=True):
    """What a step of many ranks takes longer than a step of one rank alone, in seconds.

    Attributes:
        median: median over rounds of the difference of that round.
        rounds: the differences.
        noise: what a difference may be by chance: the larger noise of the two modes.
    """

    median: float
    rounds: tuple[float, ...]
    noise: float

    @property
    def is_clear(self) -> bool:
        """Whether the overhead is more than noise, so that it may be divided by."""
        return self.median > self.noise


class Footprint(msgspec.Struct, frozen=True):
    """What a mode needs beyond processes that have loaded everything and have no model, in bytes.

    Attributes:
        title: model and optimizer.
        mode: how it was trained.
        num_ranks: on this host.
        parameter_bytes: of the model, once.
        all_bytes: of all ranks together, after some steps: parameters, gradients, optimizer state, activations.
    """

    title: str
    mode: str
    num_ranks: int
    parameter_bytes: int
    all_bytes: int

    @property
    def copies(self) -> float:
        """``all_bytes`` in sizes of the model."""
        return self.all_bytes / self.parameter_bytes


def joint_durations(timelines: Sequence[Timeline]) -> list[float]:
    """Duration of each operation that all ranks do together.

    It begins when the last rank has come and ends when the last rank has its result, so a rank that came early does not
    make the operation look long, and one that left early does not make it look short.

    Args:
        timelines: of each rank; all of the same length.
    """
    return [max(end for _, end in spans) - max(begin for begin, _ in spans) for spans in zip(*timelines, strict=True)]


def own_durations(timelines: Sequence[Timeline]) -> list[float]:
    """Duration of each call of each rank, waiting for other ranks included."""
    return [end - begin for timeline in timelines for begin, end in timeline]


def summarize(rounds: Sequence[Sequence[float]]) -> Summary:
    """Sum up the durations of the operations of each round.

    Args:
        rounds: seconds; at least one round, at least one operation in each.
    """
    medians = tuple(median(durations) for durations in rounds)
    everything = [duration for durations in rounds for duration in durations]
    p10, p90 = np.quantile(everything, (0.1, 0.9))
    return Summary(median(medians), float(p10), float(p90), medians, len(everything))


def ratio(dividend: Summary, divisor: Summary) -> Ratio:
    """How many times as long ``dividend`` took as ``divisor``; they had their turns in the same rounds."""
    quotients = [a / b for a, b in zip(dividend.rounds, divisor.rounds, strict=True)]
    return Ratio(dividend.median / divisor.median, min(quotients), max(quotients))


def overhead(step: Summary, alone: Summary) -> Overhead:
    """What ``step`` took longer than ``alone``, round by round."""
    differences = tuple(a - b for a, b in zip(step.rounds, alone.rounds, strict=True))
    return Overhead(median(differences), differences, max(step.noise, alone.noise))


def overhead_ratio(ours: Overhead, theirs: Overhead) -> tuple[float | None, str]:
    """Our overhead as a part of theirs, or None; and the reason."""
    if not theirs.is_clear:
        size, noise = theirs.median * 1e3, theirs.noise * 1e3
        return None, f"no ratio: their overhead of {size:.2f} ms is within the noise of {noise:.2f} ms"
    return ours.median / theirs.median, "medians of the rounds' overheads"


def num_iterations(seconds_each: float, seconds_in_all: float) -> int:
    """How many operations fill a turn: at least 3, at most 1,000."""
    return max(3, min(1000, round(seconds_in_all / max(seconds_each, 1e-7))))
