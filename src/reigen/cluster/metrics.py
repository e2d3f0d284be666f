"""Metrics of a job's processes: the table of all of them, and the report by which a process tells its launcher.

Names and units follow Prometheus: base units, and ``_total`` where a number only grows. A launcher that wants reports
sets `METRICS_VARIABLE` in its processes. Each of them then puts a `MetricsReport` under a key of its own
(`METRICS_PREFIX`) into the launcher's control service, or into its service for reports alone
(`METRICS_SERVICE_VARIABLE`), every so many seconds and when it leaves; a later one replaces it. Nobody waits for a
report, and what does not come is not asked for.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from reigen.cluster.membership.messages import Count
from reigen.net.codec import MessageCodec

#: Seconds between two reports of a process; set by a launcher that wants them.
METRICS_VARIABLE = "REIGEN_METRICS_SECONDS"
#: Address (host:port) and secret of the service that takes reports, where the launcher is not the ranks' rendezvous:
#: mpirun's ranks meet by themselves.
METRICS_SERVICE_VARIABLE, METRICS_SECRET_VARIABLE = "REIGEN_METRICS_SERVICE", "REIGEN_METRICS_SECRET"
#: Beginning of the keys under which reports are put.
METRICS_PREFIX = "metrics/"
MAX_REPORT_BYTES = 1 << 16
#: A label's value is cut to so many characters.
MAX_LABEL_LENGTH = 100

ProcessKind = Literal["rank", "server"]
#: Name of a metric, the values of its labels, and its value.
MetricSample = tuple[str, tuple[str, ...], float]


class Metric(NamedTuple):
    """Description of a metric.

    Attributes:
        name: as Prometheus and `reigen.metrics` have it.
        kind: a counter begins with 0 in each process, and only grows.
        text: what it counts.
        labels: their names.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...] = ()


#: Every metric of a process.
PROCESS_METRICS: tuple[Metric, ...] = (
    Metric("reigen_steps_total", "counter", "steps of the optimizer that have ended"),
    Metric("reigen_samples_total", "counter", "samples that the program has reported"),
    Metric("reigen_goal_steps", "gauge", "steps after which the training is over, as the program has reported"),
    Metric("reigen_compute_seconds_total", "counter", "time in the job in which the program did not wait for Reigen"),
    Metric(
        "reigen_wait_seconds_total",
        "counter",
        "time in which the program waited for a collective or a store, and its data was not being moved",
    ),
    Metric(
        "reigen_transfer_seconds_total",
        "counter",
        "time in which the program waited for a collective whose data was being moved and reduced",
    ),
    Metric(
        "reigen_execution_seconds_total",
        "counter",
        "time in which data was being moved and reduced, whether the program waited or not",
    ),
    Metric("reigen_operations_total", "counter", "collectives that were carried out", ("operation",)),
    Metric("reigen_batches_total", "counter", "batches of collectives that travelled together, of one or more"),
    Metric("reigen_fused_operations_total", "counter", "collectives that travelled together with others"),
    Metric("reigen_eager_operations_total", "counter", "small allreduces whose data came along with their submission"),
    Metric("reigen_response_cache_hits_total", "counter", "submissions of what the ranks had agreed on before"),
    Metric("reigen_response_cache_misses_total", "counter", "submissions that the ranks had to agree on"),
    Metric(
        "reigen_bytes_total",
        "counter",
        "bytes of this process's tensors that were brought into shared memory, to a device or to MPI, and bytes sent "
        "over the network (way)",
        ("operation", "way"),
    ),
    Metric("reigen_encoded_bytes_total", "counter", "bytes of gradients that compression has encoded"),
    Metric("reigen_code_bytes_total", "counter", "bytes of the codes that it has made of them"),
    Metric("reigen_queue_length", "gauge", "operations, messages or requests that are under way", ("queue",)),
    Metric(
        "reigen_memory_bytes",
        "gauge",
        "memory: registered (gradients in their buckets), segment (shared memory of this process, with the former), "
        "arena (of stores and servers), resident (of the whole process)",
        ("kind",),
    ),
    Metric("reigen_ranks", "gauge", "ranks of the job, or of the view of an elastic one"),
    Metric("reigen_view_epoch", "gauge", "number of the view of an elastic job"),
    Metric(
        "reigen_warm_spare",
        "gauge",
        "1: this rank of an elastic job is a warm spare, which takes no samples; 0: it is none",
    ),
    Metric(
        "reigen_view_changes_total",
        "counter",
        "changes of the members of an elastic job: planned, completed (the step under way was finished), rerun",
        ("change",),
    ),
    Metric("reigen_view_change_seconds_total", "counter", "time in which such changes let no steps be run"),
    Metric("reigen_lost_ranks_total", "counter", "members that were not in the next view"),
    Metric("reigen_joined_ranks_total", "counter", "members that were not in the view before"),
    Metric("reigen_pushes_total", "counter", "pushes of keys to parameter servers"),
    Metric("reigen_pulls_total", "counter", "pulls of keys from them"),
    Metric(
        "reigen_staleness_rounds",
        "gauge",
        "pushes of this worker that no server has acknowledged, of the key with the most",
    ),
    Metric("reigen_server_requests_total", "counter", "requests that this parameter server has had", ("request",)),
    Metric("reigen_server_keys", "gauge", "keys of which this parameter server holds a part"),
)
#: What the launcher adds about each process.
LAUNCHER_METRICS: tuple[Metric, ...] = (
    Metric("reigen_report_age_seconds", "gauge", "time since the process's last report"),
    Metric("reigen_is_waited_for", "gauge", "1 for the process that the others wait for, else 0"),
)

_BY_NAME = {metric.name: metric for metric in PROCESS_METRICS}


class MetricsReport(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Report of a process.

    Attributes:
        kind: what it is.
        number: its rank, or number among the servers.
        host: its host's name.
        epoch: number of the view in which it has that rank; 0 in a job that is not elastic.
        size: number of ranks there; 0: not known.
        waits_for: name of the collective for which its program waits; empty: for none.
        is_last: it leaves.
        samples: its metrics.
    """

    kind: ProcessKind
    number: Count
    host: str
    epoch: Count
    size: Count
    waits_for: str
    is_last: bool
    samples: tuple[MetricSample, ...]


REPORT_CODEC: MessageCodec[MetricsReport] = MessageCodec(MetricsReport, MAX_REPORT_BYTES)


def find_metric(sample: MetricSample) -> Metric | None:
    """Return the description of a process's sample; None: there is no such metric, or it has other labels."""
    metric = _BY_NAME.get(sample[0])
    return metric if metric is not None and len(metric.labels) == len(sample[1]) else None


def format_sample(sample: MetricSample) -> str:
    """Return name and labels as Prometheus writes them: ``reigen_bytes_total{operation="broadcast",way="network"}``."""
    name, values, _ = sample
    if not values:
        return name
    labels = zip(_BY_NAME[name].labels, values, strict=True)
    return f"{name}{{{','.join(f'{label}={_quote(value)}' for label, value in labels)}}}"


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
