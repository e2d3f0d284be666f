"""One rank alone, with nothing but torch: what a training step takes before anybody communicates."""

from __future__ import annotations

import torch

from benchmarks.harness.models import Backward, Training, variant_of
from benchmarks.harness.work import Case


class Alone:
    """A process that trains by itself."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.versions = {"torch": str(torch.__version__)}

    def open(self, case: Case) -> Training:
        """The training of a model; ``MODEL/backward``: the backward pass alone."""
        return (Backward if variant_of(case) == "backward" else Training)(case, self._rank)

    def close(self) -> None:
        """Nothing to leave."""


def start(rank: int, size: int) -> Alone:
    """The program of one rank."""
    return Alone(rank)
