"""What `reigen.ray.run` and `reigen.spark.run` take longer than the engine itself takes to give as many processes.

    python -m benchmarks.engines            both, on a cluster of this host; needs reigen[ray,spark]
    python -m benchmarks.engines ray --ranks 4 --rounds 5
    python -m benchmarks.engines --json docs/data/records/engines.json

The function joins the job and returns its rank. Beside it, on the same cluster: actors of Ray's in a placement group,
one a processor, that answer a call; a stage of Spark's with as many tasks, whose Pythons are there already.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.figures import overhead, summarize
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import Document, Row, Verdict, show
from benchmarks.harness.schedule import rotated, to_stderr

_BUDGET_SECONDS = 2.0


def join() -> int:
    """In a rank: join the job; return the rank."""
    import reigen

    reigen.init()
    return reigen.rank()


@contextmanager
def on_ray(num_ranks: int) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Yield what Ray does by itself, and Reigen's call."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    import reigen.ray

    class Answering:
        def answer(self) -> int:
            return 0

    def actors() -> None:
        group = placement_group([{"CPU": 1}] * num_ranks)
        try:
            ray.get(group.ready())
            strategy = PlacementGroupSchedulingStrategy(group)
            made: list[Any] = [
                ray.remote(Answering).options(num_cpus=1, scheduling_strategy=strategy).remote()
                for _ in range(num_ranks)
            ]
            ray.get([actor.answer.remote() for actor in made])
        finally:
            remove_placement_group(group)

    ray.init(num_cpus=num_ranks, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield actors, lambda: reigen.ray.run(join, num_workers=num_ranks)
    finally:
        ray.shutdown()


@contextmanager
def on_spark(num_ranks: int) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Yield what Spark does by itself, and Reigen's call."""
    from pyspark.sql import SparkSession

    import reigen.spark

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    builder = builder.master(f"local[{num_ranks}]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    context = session.sparkContext
    context.setLogLevel("ERROR")
    try:
        yield (
            lambda: context.parallelize(range(num_ranks), num_ranks).map(lambda number: number).collect(),
            lambda: reigen.spark.run(join, num_proc=num_ranks),
        )
    finally:
        session.stop()


ENGINES = {"ray": on_ray, "spark": on_spark}


def modes(engine: str) -> tuple[str, str]:
    """Return what the engine by itself and Reigen's call are called in results."""
    return f"{engine} alone", f"reigen.{engine}.run"


def measure(engine: str, num_ranks: int, rounds: int, document: Document) -> None:
    """Run both alternately, after one run of each that does not count."""
    alone, ours = modes(engine)
    samples: dict[str, list[list[float]]] = {alone: [], ours: []}
    with ENGINES[engine](num_ranks) as pair:
        calls = dict(zip((alone, ours), pair, strict=True))
        for number in range(rounds + 1):
            for name in rotated(list(calls), number):
                to_stderr(f"round {number} of {rounds}, {name}")
                begin = time.perf_counter()
                calls[name]()
                if number:
                    samples[name].append([time.perf_counter() - begin])
    summaries = {name: summarize(found) for name, found in samples.items()}
    document.rows.append(Row(f"{engine}: {num_ranks} processes", 0, summaries, alone))
    extra = overhead(summaries[ours], summaries[alone])
    claim = f"{ours}: seconds more than the engine alone"
    document.verdicts.append(Verdict(claim, extra.median, _BUDGET_SECONDS, at_least=False, note="s"))


#: What the table calls the engines.
_SHOWN = {
    "ray": "Ray: actors of a placement group, `reigen.ray.run`",
    "spark": "Spark: a stage, `reigen.spark.run`",
}


def make_table(document: Document, command: str) -> Record:
    """Return what `measure` has found, as a table."""
    found = {name: summary for row in document.rows for name, summary in row.modes.items()}
    lines: dict[str, dict[str, Quantity | str]] = {}
    for engine, title in _SHOWN.items():
        alone, ours = (found.get(name) for name in modes(engine))
        if alone is not None and ours is not None:
            lines[title] = {
                "by itself": Quantity(alone.median, unit="s"),
                "with Reigen": Quantity(ours.median, unit="s"),
                "beyond it": Quantity(overhead(ours, alone).median, unit="s"),
                "budget": Quantity(_BUDGET_SECONDS, 0, unit="s"),
            }
    conditions = f"{document.num_ranks} processes on this host, medians of {document.rounds} rounds, alternating"
    columns = [Column(name) for name in ("by itself", "with Reigen", "beyond it", "budget")]
    return make_record(command, conditions, "", columns, lines, document.machine)


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", nargs="*", choices=[*ENGINES, []], help="which (default: all)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    if min(options.ranks, options.rounds) < 1:
        parser.error("ranks and rounds must be positive")
    document = Document("engines", options.ranks, options.rounds)
    for engine in options.engine or ENGINES:
        measure(engine, options.ranks, options.rounds, document)
    show(document, "Seconds from the call to the results", Console())
    if options.json is not None:
        which = " ".join(["python -m benchmarks.engines", *options.engine])
        make_table(document, f"{which} --ranks {options.ranks} --rounds {options.rounds}").save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
