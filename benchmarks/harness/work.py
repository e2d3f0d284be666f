"""What is measured: a program that every rank of one mode runs, and the cases that it opens.

A *program* is a Python file or module with a function ``start(rank, size) -> Program``. The peers in ``benchmarks/``
are programs, and so is Reigen's own side in ``benchmarks.programs``: one loop (`benchmarks.harness.rank`) drives and
times them all.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Case(msgspec.Struct, frozen=True):
    """One thing to measure.

    Attributes:
        name: which; the program knows it.
        nbytes: size of the data on each rank, where the name leaves it open.
        count: how many tensors of that size; 0: the name says it.
        save: where rank r is to write the state after the warm-up (``save.r.npz``); empty: nowhere.
    """

    name: str
    nbytes: int = 0
    save: str = ""
    count: int = 0


class Work(Protocol):
    """A case that is ready on one rank. All ranks call the same methods in the same order."""

    def prepare(self) -> None:
        """Before each operation, not timed: for example, write fresh data."""
        ...

    def operate(self) -> None:
        """What is timed; returns when this rank has its results."""
        ...

    def check(self) -> None:
        """After the warm-up, not timed.

        Raises:
            WrongResultError: the last operation's result is wrong.
        """
        ...

    def close(self) -> None:
        """Give back what the case needed."""
        ...


class Program(Protocol):
    """One rank of a mode."""

    #: what runs, and its version
    versions: dict[str, str]

    def open(self, case: Case) -> Work:
        """Make a case ready; it may be opened while others are open."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


class WrongResultError(Exception):
    """A mode computed something wrong: its time is worth nothing."""
