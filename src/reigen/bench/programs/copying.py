"""The machine's limit: each rank copies as many bytes as an allreduce must read and write, all at the same time."""

from __future__ import annotations

import numpy as np

from reigen.bench.work import Case, WrongResultError


class Copying:
    """NumPy copies. An allreduce in place reads S and writes S bytes on each rank, however it works; so does a copy."""

    def __init__(self) -> None:
        self.versions = {"numpy": np.__version__}

    def open(self, case: Case) -> Copy:
        """``copy`` or ``fresh copy`` of ``case.nbytes`` bytes."""
        return Copy(case.nbytes, fresh=case.name == "fresh copy")

    def close(self) -> None:
        """Nothing to leave."""


class Copy:
    """One rank's `Work`.

    Args:
        nbytes: how many are copied.
        fresh: write the source anew before each copy, as the modes that reduce do. It is slower: without, the source is
            unmodified in whatever cache holds it.
    """

    def __init__(self, nbytes: int, *, fresh: bool) -> None:
        self._fresh = fresh
        self._source = np.ones(nbytes // 4, np.float32)
        self._target = np.zeros(nbytes // 4, np.float32)

    def prepare(self) -> None:
        """Write the source anew, if it is to be fresh."""
        if self._fresh:
            self._source.fill(1)

    def operate(self) -> None:
        """Copy."""
        np.copyto(self._target, self._source)

    def check(self) -> None:
        """The copy is one.

        Raises:
            WrongResultError: it is not.
        """
        if not (self._target == 1).all():
            raise WrongResultError("the copy differs")

    def close(self) -> None:
        """Nothing to give back."""


def start(rank: int, size: int) -> Copying:
    """The program of one rank."""
    return Copying()
