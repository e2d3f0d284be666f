"""Results of benchmarks: the files that ``--json`` of `reigen bench` and of ``python -m benchmarks.NAME`` writes.

Of `benchmarks.harness.report.Document`, which writes them, this is what pictures and tables need. The
files in docs/data hold the figures of docs/benchmarks.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec


class ResultsError(Exception):
    """A file cannot be used; the message says which one, and what is wrong with it."""


class Figure(msgspec.Struct, frozen=True):
    """What one mode took, in seconds.

    Attributes:
        median: of rounds.
        noise: what it may be by chance, if that is known.
    """

    median: float
    noise: float = 0.0

    @property
    def is_clear(self) -> bool:
        """Whether it is more than noise."""
        return self.median > self.noise


class Time(Figure, frozen=True):
    """What one mode took, in seconds: a median that is a time."""

    median: Annotated[float, msgspec.Meta(gt=0)]


class Ratio(msgspec.Struct, frozen=True):
    """A time divided by another one: the quotient of medians, and the smallest and largest of a round."""

    value: float
    low: float
    high: float


class ResultRow(msgspec.Struct, frozen=True):
    """What several modes did in the same rounds.

    Attributes:
        title: what.
        nbytes: of data on each rank; 0 where that says nothing.
        modes: what each took.
        ratios: how many times as long as the mode that is compared with.
    """

    title: str
    nbytes: int
    modes: dict[str, Time]
    ratios: dict[str, Ratio] = {}


class Footprint(msgspec.Struct, frozen=True):
    """What training needs in memory; see `benchmarks.harness.figures.Footprint`."""

    title: str
    mode: str
    parameter_bytes: int
    all_bytes: int


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured: the processor's model, how many there were, and the processes that wanted one before."""

    cpu: str
    num_cores: int
    load: float


class Verdict(msgspec.Struct, frozen=True):
    """A figure beside its budget; without a value if it was not measured. See `benchmarks.harness.report.Verdict`."""

    claim: str
    value: float | None
    budget: float
    at_least: bool
    note: str


class Results(msgspec.Struct, frozen=True):
    """The figures of a run.

    Attributes:
        command: what was run.
        created: when, in ISO 8601.
        machine: where.
        versions: of Reigen, Python and the peers.
        num_ranks: how many processes each mode had.
        rounds: how many turns each mode had.
        rows: times.
        overheads: what a step took longer than one rank alone: model -> mode -> seconds.
        verdicts: what is held beside budgets.
        footprints: memory, where it was measured.
    """

    command: str
    created: str
    machine: Machine
    versions: dict[str, str]
    num_ranks: int
    rounds: int
    rows: list[ResultRow]
    overheads: dict[str, dict[str, Figure]] = {}
    verdicts: list[Verdict] = []
    footprints: list[Footprint] = []


def read_results(path: Path) -> Results:
    """Read a file of results.

    Raises:
        ResultsError: it cannot be read, or is no file of results.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path} is not what `reigen bench --json` writes: {error}") from None
