"""The machine's limit: each rank copies as many bytes as an allreduce must read and write, all at the same time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case, WrongResultError


class Copying:
    """NumPy copies. An allreduce in place reads S and writes S bytes on each rank, however it works; so does a copy.

    A push and a pull are two: to where all workers' arrays are added up, and back.
    """

    def __init__(self) -> None:
        self.versions = {"numpy": np.__version__}

    def open(self, case: Case) -> Copy:
        """``copy`` or ``fresh copy`` of ``case.nbytes`` bytes, or ``two copies`` of each of the case's arrays."""
        if case.name == "two copies":
            return Copy(element_counts(case), num_copies=2)
        return Copy([case.nbytes // 4], fresh=case.name == "fresh copy")

    def close(self) -> None:
        """Nothing to leave."""


class Copy:
    """One rank's `Work`.

    Args:
        counts: how many elements each array has.
        num_copies: how often all are copied, the second time from the copies.
        fresh: write the source anew before each copy, as the modes that reduce do. It is slower: without, the source is
            unmodified in whatever cache holds it.
    """

    def __init__(self, counts: Sequence[int], *, num_copies: int = 1, fresh: bool = False) -> None:
        self._fresh = fresh
        self._sources = [np.ones(count, np.float32) for count in counts]
        self._copies = [[np.zeros(count, np.float32) for count in counts] for _ in range(num_copies)]

    def prepare(self) -> None:
        """Write the source anew, if it is to be fresh."""
        if self._fresh:
            for source in self._sources:
                source.fill(1)

    def operate(self) -> None:
        """Copy."""
        for sources, targets in itertools.pairwise([self._sources, *self._copies]):
            for source, target in zip(sources, targets, strict=True):
                np.copyto(target, source)

    def check(self) -> None:
        """The copies are some.

        Raises:
            WrongResultError: one is not.
        """
        if not all((copy == 1).all() for copy in self._copies[-1]):
            raise WrongResultError("the copy differs")

    def close(self) -> None:
        """Nothing to give back."""


def start(rank: int, size: int) -> Copying:
    """The program of one rank."""
    return Copying()
