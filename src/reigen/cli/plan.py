"""`reigen plan`: prediction of a job's speed and cost on a described cluster, and how many servers it should have."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from reigen.cli.tables import print_table
from reigen.errors import ArgumentError
from reigen.files import write_atomically
from reigen.planner.chart import ChartSeries, draw_chart
from reigen.planner.cluster import Cluster, read_cluster
from reigen.planner.comparison import Comparison, ComparisonOptions, check_can_hold, compare
from reigen.planner.costs import Costs, read_costs
from reigen.planner.models import MODELS, built_in_profile
from reigen.planner.prediction import Prediction
from reigen.planner.profile import TrainingProfile, read_profile
from reigen.planner.units import format_number

_EPILOG = """\
cluster.yaml, train.json and the calibration file are described in docs/planner.md. "hierarchical" is what Reigen does
by itself: shared memory, or links between devices, within each host, and the TCP backend between hosts; "ring" is one
ring through all ranks. Efficiency is throughput, divided by the number of ranks and by that of one rank alone.
"""


def main(arguments: Sequence[str]) -> int:
    """Print predictions; returns 0, 1 for files that are wrong."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if (chosen.profile is None) == (chosen.model is None):
        parser.error("give train.json, or --model, and not both")
    try:
        profile = _profile(chosen)
        cluster, costs = read_cluster(chosen.cluster), Costs() if chosen.costs is None else read_costs(chosen.costs)
        sizes = chosen.ranks or [cluster.num_ranks]
        check_can_hold(cluster, sizes)
        options = ComparisonOptions(
            tuple(chosen.servers),
            tuple({"type": name} for name in chosen.compression),
            sums_on_host=chosen.sums_on_host,
            update_on_servers=not chosen.update_on_workers,
        )
        found = {size: compare(profile, cluster.resized(size), costs, options) for size in sizes}
        if chosen.picture is not None:
            write_atomically(chosen.picture, [draw_comparisons(profile, cluster, found).encode()])
    except ArgumentError as error:
        print(f"reigen plan: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"reigen plan: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(to_json(profile, cluster, costs, found), indent=1))
    else:
        for size, comparison in found.items():
            _print_comparison(profile, cluster, costs, comparison, size)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reigen plan",
        description="Predict how fast a job trains on a cluster, by collectives and with parameter servers, what "
        "bounds it, and what an epoch costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("profile", nargs="?", metavar="train.json", help="profile of one rank")
    parser.add_argument("--model", choices=sorted(MODELS), help="a built-in model instead of a profile")
    parser.add_argument(
        "--samples-per-second", type=_positive, metavar="N", help="(--model) samples per second of one rank alone"
    )
    parser.add_argument("--batch", type=_count, metavar="N", help="(--model) samples of one rank per step")
    parser.add_argument("--cluster", required=True, metavar="cluster.yaml", help="hosts, links, prices")
    parser.add_argument("--costs", metavar="FILE", help="calibration written by `reigen bench`")
    parser.add_argument(
        "--ranks",
        type=_counts,
        default=[],
        metavar="N,N",
        help="predict for these numbers of ranks, on the first hosts",
    )
    parser.add_argument(
        "--servers", type=_counts, default=[], metavar="N,N", help="numbers of servers (default: 1 to 2 x workers)"
    )
    parser.add_argument(
        "--compression", type=_names, default=["fp16"], metavar="TYPE,TYPE",
        help="types of compression to try, or none (default: fp16)",
    )  # fmt: skip
    parser.add_argument(
        "--sums-on-host", action="store_true", help="(servers) the ranks of a host are one worker, as in MXNet"
    )
    parser.add_argument(
        "--update-on-workers", action="store_true", help="(servers) workers update the weights, servers only add up"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--picture", metavar="FILE", help="also draw throughputs and efficiencies (SVG)")
    return parser


def _profile(chosen: argparse.Namespace) -> TrainingProfile:
    if chosen.model is None:
        if chosen.samples_per_second or chosen.batch:
            raise ArgumentError("--samples-per-second and --batch are for built-in models; train.json has its own")
        return read_profile(chosen.profile)
    changes = {} if chosen.batch is None else {"batch": chosen.batch}
    return built_in_profile(chosen.model, samples_per_second=chosen.samples_per_second, **changes)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _counts(text: str) -> list[int]:
    return sorted({_count(part) for part in text.split(",")})


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name not in {"", "none"}]


def strategy_name(prediction: Prediction, has_groups: bool) -> str:
    """Return the name of a strategy for people; ``has_groups``: some host has several ranks, and there are several."""
    name = prediction.strategy.name
    return name.replace("allreduce", "hierarchical", 1) if has_groups else name


def _has_groups(prediction: Prediction, cluster: Cluster) -> bool:
    return len([host for host in cluster.hosts if host.num_ranks]) > 1 and prediction.num_ranks > prediction.num_hosts


def _print_comparison(profile: TrainingProfile, cluster: Cluster, costs: Costs, found: Comparison, size: int) -> None:
    first = found.predictions[0]
    print(
        f"{profile.name}: {first.num_ranks} ranks on {first.num_hosts} hosts, {profile.nbytes / 1e6:.1f} MB of "
        f"gradients; a rank alone takes {first.alone_seconds * 1e3:.4g} ms for {profile.batch} samples"
        + (f" ({size - first.num_ranks} ranks are lost with their hosts)" if size > first.num_ranks else "")
    )
    has_groups = _has_groups(first, cluster.resized(size))
    headings = [
        "strategy",
        "step",
        "samples/s",
        "efficiency",
        "bound by",
        "sent by a host",
        "epoch",
        "cost of an epoch",
    ]
    print_table(headings, [_row(each, has_groups, cluster.currency) for each in found.predictions])
    print(f"Fastest: {strategy_name(found.best, has_groups)}: {found.best.reason}.")
    if found.cheapest is not None and found.cheapest is not found.best:
        print(f"Cheapest: {strategy_name(found.cheapest, has_groups)}, {found.cheapest.epoch_cost:.2f} an epoch.")
    if found.num_servers:
        print(f"How many servers? {found.servers_reason}.")
    for note in first.notes:
        print(f"Note: {note}.")
    if not costs.source:
        print("Note: costs of messages and bytes are defaults; --costs takes a calibration of your hosts.")
    if cluster.prices_of:
        print(f"Prices: {cluster.prices_of}.")
    print()


def _row(each: Prediction, has_groups: bool, currency: str) -> list[str]:
    return [
        strategy_name(each, has_groups),
        f"{format_number(each.step_seconds * 1e3)} ms",
        format_number(each.samples_per_second),
        f"{each.efficiency:.1%}",
        each.bound,
        f"{format_number(each.wire_bytes / 1e6)} MB",
        "" if each.epoch_seconds is None else f"{format_number(each.epoch_seconds)} s",
        "" if each.epoch_cost is None else f"{each.epoch_cost:.2f} {currency}",
    ]


def to_json(profile: TrainingProfile, cluster: Cluster, costs: Costs, found: dict[int, Comparison]) -> dict[str, Any]:
    """Return everything for ``--json``; activities of steps are left out."""
    jobs = []
    for size, comparison in found.items():
        predictions = []
        for each in comparison.predictions:
            content = dataclasses.asdict(dataclasses.replace(each, activities=()))
            del content["activities"]
            predictions.append({"name": each.strategy.name, **content})
        jobs.append({
            "ranks": size, "predictions": predictions, "fastest": comparison.best.strategy.name,
            "cheapest": None if comparison.cheapest is None else comparison.cheapest.strategy.name,
            "num_servers": comparison.num_servers, "servers_reason": comparison.servers_reason,
        })  # fmt: skip
    prices = {"currency": cluster.currency, "prices_of": cluster.prices_of}
    return {"version": 1, "profile": profile.name, "costs": costs.source or "defaults", **prices, "jobs": jobs}


def draw_comparisons(profile: TrainingProfile, cluster: Cluster, found: dict[int, Comparison]) -> str:
    """Return a picture of throughputs (columns) and efficiencies (lines)."""
    predicted: dict[int, dict[str, Prediction]] = {}
    for size, comparison in found.items():
        has_groups = _has_groups(comparison.predictions[0], cluster.resized(size))
        predicted[size] = {strategy_name(each, has_groups): each for each in comparison.predictions}
    names = list(dict.fromkeys(name for by_name in predicted.values() for name in by_name))
    if len(found) == 1:
        [(size, by_name)] = predicted.items()
        columns, line = _heights([by_name[name] for name in names])
        groups, series = names, [ChartSeries(f"{size} ranks", columns, line)]
    else:
        groups, series = [f"{size} ranks" for size in found], []
        for name in names:
            series.append(ChartSeries(name, *_heights([by_name.get(name) for by_name in predicted.values()])))
    return draw_chart(profile.name, groups, series, "samples/s", "efficiency")


def _heights(predictions: Sequence[Prediction | None]) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    columns = tuple(None if each is None else each.samples_per_second for each in predictions)
    return columns, tuple(None if each is None else each.efficiency for each in predictions)
