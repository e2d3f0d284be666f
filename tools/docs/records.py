"""Tables of docs/data/records: ``python -m tools.docs.records FILE`` makes those of shared parameters anew.

FILE is what ``reigen bench train-step --models mlp,deep --optimizers sgd,adam --memory --json FILE`` has written. The
other records are what ``--json`` or ``--table`` of their benchmarks writes, or figures that were entered manually.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness.record import Column, Line, Quantity, Record
from benchmarks.harness.report import markdown
from benchmarks.train_step import ALONE, DDP_DEFAULT, DDP_VIEW, REIGEN, SHARED
from tools.docs.charts import DATA
from tools.docs.results import Results, ResultsError, read_results

RECORDS = DATA / "records"
_TITLES = {
    "mlp": "mlp, SGD with momentum",
    "mlp+adam": "mlp, Adam",
    "deep": "deep, SGD with momentum",
    "deep+adam": "deep, Adam",
}
#: The columns of both tables, and the modes in them, of which the least counts.
_MODES = {
    "one rank alone": (ALONE,),
    "buckets": (REIGEN,),
    "shared parameters": (SHARED,),
    "DDP (its better setting)": (DDP_DEFAULT, DDP_VIEW),
}
_RATIO = "shared / alone, by round"


def read_record(path: Path) -> Record:
    """Read a table.

    Raises:
        ResultsError: it cannot be read, is none, or a line has a cell without a column.
    """
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path} is no table: {error}") from None
    names = {column.name for column in record.columns}
    strays = {line.title: sorted(line.cells.keys() - names) for line in record.lines if line.cells.keys() - names}
    if strays or not record.lines:
        raise ResultsError(f"{path}: no lines, or cells without a column: {strays}; columns are {sorted(names)}")
    return record


def draw_record(record: Record) -> str:
    """Return a table in Markdown, and below it where its figures are from."""
    headings, *lines = record.cells()
    return f"\n{markdown(headings, lines)}\n\n{record.origin()}\n\n"


def shared_parameters(results: Results) -> dict[str, Record]:
    """Return the tables of shared parameters of a file of `reigen bench train-step`, by name.

    Raises:
        ResultsError: it has no step with shared parameters, or no memory.
    """
    times = {row.title: {mode: time.median for mode, time in row.modes.items()} for row in results.rows}
    sizes: dict[str, dict[str, float]] = {}
    for each in results.footprints:
        sizes.setdefault(each.title, {})[each.mode] = each.all_bytes / each.parameter_bytes
    ratios = {row.title: row.ratios[SHARED] for row in results.rows if SHARED in row.ratios}
    steps, memory = _lines(times, 1000.0), _lines(sizes, 1.0, digits=1)
    if not ratios or not memory:
        raise ResultsError(f"no step with shared parameters, or no memory, in {results.command}")
    for title, line in steps.items():
        found = ratios.get(title)
        if found is not None:
            line[_RATIO] = Quantity(found.value, 2, found.low, found.high)
    host = results.machine
    machine = f"{host.cpu}, {host.num_cores} cores, load before the run {host.load:.1f}"
    conditions = f"{results.num_ranks} ranks, medians of {results.rounds} rounds; {machine}"
    columns = [Column(name, "ms") for name in _MODES] + [Column(_RATIO)]
    plain = [Column(name) for name in _MODES]
    return {
        "shared-parameters": _record(results, conditions, "step", columns, steps),
        "shared-memory": _record(results, conditions, "sizes of the model", plain, memory),
    }


def _lines(
    found: Mapping[str, Mapping[str, float]], scale: float, digits: int | None = None
) -> dict[str, dict[str, Quantity | str]]:
    lines: dict[str, dict[str, Quantity | str]] = {}
    for title in _TITLES:
        row = found.get(title, {})
        if SHARED in row:
            values = {name: [scale * row[each] for each in modes if each in row] for name, modes in _MODES.items()}
            least = {name: min(each) for name, each in values.items() if each}
            lines[title] = {
                name: Quantity(value, (0 if value >= 100 else 1) if digits is None else digits)
                for name, value in least.items()
            }
    return lines


def _record(
    results: Results,
    conditions: str,
    title: str,
    columns: Sequence[Column],
    lines: Mapping[str, Mapping[str, Quantity | str]],
) -> Record:
    made = tuple(Line(_TITLES[name], dict(cells)) for name, cells in lines.items())
    command = re.sub(r" --json \S+", "", results.command)
    return Record(command, results.created, conditions, False, title, tuple(columns), made)


def main(arguments: Sequence[str]) -> int:
    """Write the tables of a file; returns 0, or 1 with a message, or 2."""
    if len(arguments) != 1:
        print("usage: python -m tools.docs.records FILE", file=sys.stderr)
        return 2
    try:
        for name, record in shared_parameters(read_results(Path(arguments[0]))).items():
            record.save(RECORDS / f"{name}.json")
    except ResultsError as error:
        print(f"records: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
