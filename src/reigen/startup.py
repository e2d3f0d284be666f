"""Start of a process in its job: from its environment to the rendezvous of the ranks, and rank 0's log of the job."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from reigen.cluster.bootstrap.control import ServiceAccess, ServiceOptions, locate_service
from reigen.cluster.bootstrap.rank_lock import claim_rank
from reigen.cluster.environ import (
    RANK_VARIABLES,
    RENDEZVOUS_VARIABLE,
    SECRET_VARIABLE,
    SLOT_VARIABLE,
    JobInfo,
    detect_job,
    parse_secret,
)
from reigen.cluster.host_discovery import discover_hosts
from reigen.cluster.membership.rendezvous import (
    PrefixRendezvous,
    ReconnectingRendezvous,
    Rendezvous,
    RendezvousClient,
)
from reigen.cluster.metrics import METRICS_SECRET_VARIABLE, METRICS_SERVICE_VARIABLE, METRICS_VARIABLE, ProcessKind
from reigen.cluster.topology import renumber_rank
from reigen.config import (
    Config,
    format_changed_knobs,
    format_ignored_variables,
    format_unknown_variables,
    shared_settings,
)
from reigen.engine_factory import JobRendezvous

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext
    from reigen.observe.metrics import JobPart

#: How long the launcher's service may take to accept a report.
_REPORT_SECONDS = 5.0
#: Variables with the numbers of processes.
_NUMBERS: dict[ProcessKind, str] = {"rank": RANK_VARIABLES[0], "server": "DMLC_TASK_ID"}
_log = logging.getLogger(__name__)

#: how often this process has joined each job, by the job's secret and its ranks: all ranks count alike
_generations: Counter[tuple[bytes, str]] = Counter()
#: to the control services of jobs, each found once in a process and kept until its end: what rank 0 hosts outlives
#: `shutdown` in this way, and `init` may follow
_accesses: dict[JobInfo, ServiceAccess] = {}


def join_rendezvous(
    job: JobInfo, config: Config, environ: Mapping[str, str], ranks: Sequence[int] | None
) -> JobRendezvous | None:
    """Return the rendezvous with the other ranks of the job; None for a process that is alone.

    Args:
        job: the facts in the environment.
        config: the knobs.
        environ: environment variables.
        ranks: some of its ranks that form a job of their own, numbered in this order; None for all.

    Raises:
        ArgumentError: ``ranks`` are none of the job, or this rank is not one of them.
        ConfigError: another process is this rank, the ranks cannot prove to each other that they belong together, or
            have different settings of knobs that must agree.
        DeadlineError: other ranks did not come; names them.
        AuthenticationError: the control service knows another secret.
    """
    if job.size == 1 and job.rendezvous is None:
        return None
    rank, size, namespace = job.rank, job.size, ""
    if ranks is not None and tuple(ranks) != tuple(range(size)):
        rank, size = renumber_rank(job.rank, job.size, ranks), len(ranks)
        namespace = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    timeout, tls = config.start_timeout_seconds, job_tls(config)
    options = ServiceOptions(timeout, config.network_interfaces, config.peer_timeout_seconds, tls)
    if job not in _accesses:
        _accesses[job] = located = locate_service(job, environ, options)
        if job.rank == 0:
            _log.info("control service at %s: %s", located.address, located.reason)
        atexit.register(located.close)  # behind all that is registered later
    access = _accesses[job]
    rendezvous = RendezvousClient(access.address, access.secret, job.rank, timeout, tls)
    try:
        incarnation = claim_rank(rendezvous, job.rank)
        namespace = f"{incarnation} {namespace}" if incarnation else namespace
        job_rendezvous = PrefixRendezvous(rendezvous, namespace) if namespace else rendezvous
        generation = _generations[access.secret, namespace]
        generation_rendezvous = PrefixRendezvous(job_rendezvous, f"{generation}")
        layout = discover_hosts(
            generation_rendezvous, rank, size, timeout, config.host_id or "", shared_settings(config)
        )
    except BaseException:
        rendezvous.close()
        raise
    return JobRendezvous(
        layout, job_rendezvous, generation, access.address, access.secret, namespace, tls, tuple(ranks or ())
    )


def count_generation(job_rendezvous: JobRendezvous) -> None:
    """Count that this process and the others are in the job: their next rendezvous is apart from this one."""
    _generations[job_rendezvous.secret, job_rendezvous.namespace] += 1


def report_metrics(
    environ: Mapping[str, str],
    config: Config,
    kind: ProcessKind,
    find_part: Callable[[], JobPart | None],
    find_rendezvous: Callable[[], Rendezvous] | None,
) -> None:
    """Report this process's metrics to its launcher from now on; does nothing where it does so already.

    Args:
        environ: environment variables, of which the launcher has set METRICS_VARIABLE, and METRICS_SERVICE_VARIABLE
            where it is not who started this process.
        config: the knobs.
        kind: what the process is.
        find_part: returns its part in the job as it is now.
        find_rendezvous: returns the launcher's rendezvous; None: it is where ``environ`` says.
    """
    from reigen.observe import metrics

    is_apart = METRICS_SERVICE_VARIABLE in environ
    names = (METRICS_SERVICE_VARIABLE, METRICS_SECRET_VARIABLE) if is_apart else (RENDEZVOUS_VARIABLE, SECRET_VARIABLE)
    address, secret = environ.get(names[0]), parse_secret(environ.get(names[1], ""))
    number, slot, seconds = map(environ.get, (_NUMBERS[kind], SLOT_VARIABLE, METRICS_VARIABLE))
    if is_apart and kind == "rank" and number is None:
        number = f"{detect_job(environ).rank}"
    if address is None or secret is None or not seconds:
        return
    place = int(number or slot or 0)
    name = metrics.ProcessName(kind, place, place if slot is None else int(slot))

    def connect(where: str) -> RendezvousClient:
        return RendezvousClient(where, secret, name.key, _REPORT_SECONDS, job_tls(config))

    metrics.start_reporting(
        lambda: metrics.MetricsReporter(
            name,
            find_rendezvous() if find_rendezvous is not None else ReconnectingRendezvous(lambda: address, connect),
            find_part,
            float(seconds),
        )
    )


def job_tls(config: Config) -> TlsContext | None:
    """Return what encrypts this process's connections; None: they are not encrypted."""
    return _tls() if config.tls else None


@functools.cache
def _tls() -> TlsContext:
    from reigen.net.tls import TlsContext

    return TlsContext()


def log_job(job: JobInfo, config: Config, environ: Mapping[str, str], size: int, backend: tuple[str, str]) -> None:
    """Log the origin of a job of ``size`` processes, its knobs, and its backend with the reason."""
    _log.info("%d process(es), started by %s: %s", size, job.launcher, job.reason)
    _log.info("backend %s: %s", *backend)
    for line in (*format_changed_knobs(config), *format_ignored_variables(environ)):
        _log.info("%s", line)
    if unknown := format_unknown_variables(environ):
        _log.warning("environment variables that mean nothing to Reigen: %s", ", ".join(unknown))
