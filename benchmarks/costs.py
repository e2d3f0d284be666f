"""`reigen bench costs`: what messages and bytes cost on this machine, for the planner (`reigen plan --costs FILE`).

Everything runs on this host: sums in shared memory, sums over TCP's loopback, copies, additions, pushes and pulls of
one worker over loopback. Times are the 10th percentile of all operations: what else runs on the machine only ever makes
them longer. From the times of several sizes follow costs by least squares of relative errors, none below 0; the notes
say what part of a time the costs leave unexplained.

Latencies and rates of a network are not measured here: they stand in the description of the cluster.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.report import Document, Row
from benchmarks.harness.schedule import Mode, Report, about, alternate, crews
from benchmarks.harness.servers import Seat, parameter_servers, worker_starts
from benchmarks.harness.sizes import format_size
from benchmarks.harness.work import Case
from reigen.errors import LaunchError
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.planner.collectives import plan_tcp
from reigen.planner.costs import Costs
from reigen.types import DTYPES, ReduceOp

SHARED, TCP, COPYING, SERVER, UPDATING = "shared memory", "loopback", "copying", "server", "server, sgd"
_SUMS = "benchmarks.programs.allreduce"
_KV = str(Path(__file__).with_name("kv_reigen.py"))
SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24, 25))
#: Of copies: more than caches hold on most machines.
_COPY_SIZES = SIZES[-2:]
#: Keys of a push: so many of so many bytes. Smaller ones than 256 KiB travel together.
KEYS = ((1, 1 << 19), (4, 1 << 19), (16, 1 << 19), (1, 1 << 23), (4, 1 << 22))
#: What has arrived is in the cache, what it is added to is not: pieces of an array that is larger than caches.
_REDUCE_BYTES, _REDUCE_PIECES = 1 << 20, 128


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: of the sums.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
    """

    num_ranks: int
    rounds: int
    turn_seconds: float


@dataclass(frozen=True)
class CostFit:
    """Costs of some features, and how well they explain the times: ``error`` is the median part that is left."""

    values: tuple[float, ...]
    error: float


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> CostFit:
    """Fit one cost to each feature, so that their sums come near to the times: least squares of relative errors.

    No cost is negative: of all choices of features whose best costs are positive, the others being free, the one with
    the least error is taken. There are few features.

    Args:
        features: of each time, how much it has of each feature.
        seconds: the times, above 0.

    Example:
        >>> fit = fit_costs([[1, 0], [1, 100], [1, 1000]], [2.0, 4.0, 22.0])
        >>> [round(value, 6) for value in fit.values]
        [2.0, 0.02]
    """
    times = np.asarray(seconds, float)
    table = np.asarray(features, float) / times[:, None]
    best: tuple[float, tuple[float, ...]] = (math.inf, ())
    for chosen in itertools.product((False, True), repeat=table.shape[1]):
        columns = np.flatnonzero(chosen)
        values = np.zeros(table.shape[1])
        if len(columns):
            values[columns] = np.linalg.lstsq(table[:, columns], np.ones(len(times)))[0]
        if (values < 0).any():
            continue
        left = float(np.square(table @ values - 1).sum())
        if left < best[0]:
            best = left, tuple(values.tolist())
    errors = np.abs(table @ np.asarray(best[1]) - 1)
    return CostFit(best[1], float(median(errors.tolist())))


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of an operation, by how it is done and bytes (of keys: number and bytes of each)."""

    registered: Mapping[int, float]
    backend: Mapping[int, float]
    tcp: Mapping[int, float]
    copies: Mapping[int, float]
    keys: Mapping[tuple[int, int], float]
    updated_keys: Mapping[tuple[int, int], float]
    reduce_seconds_per_byte: float


def derive_costs(times: MeasuredTimes, num_ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Derive costs from times.

    Args:
        times: of which those that are empty tell nothing: their costs keep their defaults.
        num_ranks: of the sums.

    Returns:
        Values of `Costs`' fields; and of each fit, what part of a time it leaves unexplained (median).
    """
    found: dict[str, float] = {"reduce_seconds_per_byte": times.reduce_seconds_per_byte}
    errors: dict[str, float] = {}
    if times.copies:
        copy = fit_costs([[size] for size in times.copies], list(times.copies.values()))
        found["copy_seconds_per_byte"], errors[COPYING] = copy.values[0], copy.error
    if times.registered and times.backend:
        whole, bare = (_fit_line(each) for each in (times.registered, times.backend))
        found["barrier_seconds"] = bare.values[0] / 2  # before the sum, and before the results are read
        found["operation_seconds"] = max(0.0, whole.values[0] - bare.values[0])
        copied = found.get("copy_seconds_per_byte", Costs().copy_seconds_per_byte)
        found["shm_seconds_per_byte"] = max(0.0, whole.values[1] - copied)
        errors[SHARED] = whole.error
    if times.tcp:
        found |= _derive_tcp(times, num_ranks, errors)
    if times.keys:
        found |= _derive_servers(times, errors)
    return found, errors


def _fit_line(times: Mapping[int, float]) -> CostFit:
    return fit_costs([[1.0, size] for size in times], list(times.values()))


def _derive_tcp(times: MeasuredTimes, num_ranks: int, errors: dict[str, float]) -> dict[str, float]:
    """Hops, messages and bytes, as the backend's own plans count them; additions are known."""
    features, seconds = [], []
    for size, took in times.tcp.items():
        plan = plan_tcp(size // 4, 4, num_ranks, "auto")
        features.append([plan.hops, 2.0 * plan.messages, plan.sent])
        seconds.append(max(took / 10, took - plan.reduced * times.reduce_seconds_per_byte))
    fit = fit_costs(features, seconds)
    errors[TCP] = fit.error
    default = Costs()
    both = default.tcp_send_seconds_per_byte + default.tcp_receive_seconds_per_byte
    # Sender and receiver share their processors here: loopback tells the sum, which is divided as by default.
    return {
        "wakeup_seconds": fit.values[0],
        "tcp_message_seconds": fit.values[1],
        "tcp_send_seconds_per_byte": fit.values[2] * default.tcp_send_seconds_per_byte / both,
        "tcp_receive_seconds_per_byte": fit.values[2] * default.tcp_receive_seconds_per_byte / both,
    }


def _derive_servers(times: MeasuredTimes, errors: dict[str, float]) -> dict[str, float]:
    """One worker and one server, each on its processor: what a request and a byte take the slower of the two."""
    features = [[1.0, count, count * size] for count, size in times.keys]
    fit = fit_costs(features, list(times.keys.values()))
    errors[SERVER] = fit.error
    found = {"request_seconds": fit.values[1], "server_request_seconds": fit.values[1]}
    more = [
        (times.updated_keys[each] - took) / (each[0] * each[1])
        for each, took in times.keys.items()
        if each in times.updated_keys
    ]
    if more:
        found["server_update_seconds_per_byte"] = max(0.0, median(more))
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def run(settings: Settings, command: str, report: Report) -> tuple[Document, dict[str, float]]:
    """Measure; returns what was found, and the costs."""
    document = Document(command, settings.num_ranks, settings.rounds)
    bench = _Bench(settings, document, report)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(parameter_servers(1, Seat(), [Seat()])) for name in (SERVER, UPDATING)}
        over_socket = {"REIGEN_KV_SHARED_MEMORY": "0"}
        specs = [
            CrewSpec(SHARED, _SUMS, settings.num_ranks),
            CrewSpec(TCP, _SUMS, settings.num_ranks, variables={"REIGEN_PLANE": "tcp"}),
            CrewSpec(COPYING, "benchmarks.programs.copying", settings.num_ranks),
            *(
                CrewSpec(name, _KV, 1, starts=worker_starts({**common, **over_socket}, [Seat()]))
                for name, common in servers.items()
            ),
        ]
        came, failures = stack.enter_context(crews(specs, report))
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        times = bench.measure(came)
    costs, errors = derive_costs(times, settings.num_ranks)
    document.notes += [f"{name}: {value:.3g}" for name, value in costs.items()]
    document.notes += [
        f"{name}: the costs leave {error:.0%} of a time unexplained (median)" for name, error in errors.items()
    ]
    return document, costs


class _Bench:
    """One run."""

    def __init__(self, settings: Settings, document: Document, report: Report) -> None:
        self._settings, self._document, self._report = settings, document, report

    def measure(self, came: Mapping[str, Crew]) -> MeasuredTimes:
        """Measure with the crews that came."""
        return MeasuredTimes(
            registered=self._sums(came, SHARED, "registered", SIZES),
            backend=self._sums(came, SHARED, "backend", SIZES[:4]),
            tcp=self._sums(came, TCP, "backend", SIZES),
            copies=self._sums(came, COPYING, "fresh copy", _COPY_SIZES),
            keys=self._keys(came, SERVER, "plain"),
            updated_keys=self._keys(came, UPDATING, "sgd"),
            reduce_seconds_per_byte=time_reduction(),
        )

    def _sums(self, came: Mapping[str, Crew], name: str, case: str, sizes: Sequence[int]) -> dict[int, float]:
        if name not in came:
            return {}
        took = {
            size: self._time(f"{name}, {case}, {format_size(size)}", came[name], Case(case, size)) for size in sizes
        }
        return {size: seconds for size, seconds in took.items() if seconds}

    def _keys(self, came: Mapping[str, Crew], name: str, case: str) -> dict[tuple[int, int], float]:
        if name not in came:
            return {}
        took = {}
        for position, (count, size) in enumerate(KEYS):
            # a store has one optimizer: it is set by the first case, and works for the keys of all
            use = case if case == "plain" or not position else "plain"
            title = f"{name}, {count} keys of {format_size(size)}"
            took[count, size] = self._time(title, came[name], Case(use, size, count=count))
        return {key: seconds for key, seconds in took.items() if seconds}

    def _time(self, title: str, crew: Crew, case: Case) -> float:
        """The 10th percentile, in seconds; 0.0 where it failed."""
        settings = self._settings
        outcome = alternate(
            [Mode(title, crew, case)], settings.rounds, settings.turn_seconds, about(title, self._report)
        )
        self._document.rows.append(
            Row(title, case.nbytes * (case.count or 1), outcome.summaries, title, outcome.failures)
        )
        return outcome.summaries[title].p10 if title in outcome.summaries else 0.0


def time_reduction(clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of adding up what has arrived, for each byte that is read, on one processor."""
    reducer = BlockReducer(Reduction(DTYPES["float32"], ReduceOp.SUM, 2))
    arrived, own = np.ones(_REDUCE_BYTES // 4, np.float32), np.ones((_REDUCE_PIECES, _REDUCE_BYTES // 4), np.float32)
    took = []
    for piece in own:
        begin = clock()
        reducer.reduce([piece, arrived], piece)
        took.append(clock() - begin)
    return float(np.quantile(took, 0.1)) / (2 * _REDUCE_BYTES)


def costs_content(document: Document, costs: Mapping[str, float]) -> dict[str, object]:
    """Return the content of the file that `reigen.planner.costs.read_costs` reads.

    Raises:
        LaunchError: nothing was measured.
    """
    if document.has_failed(SHARED) and document.has_failed(TCP):
        raise LaunchError("neither shared memory nor loopback could be measured: " + "; ".join(document.skipped))
    return {"version": 1, "machine": str(document.machine), "date": document.created, "costs": dict(costs)}
