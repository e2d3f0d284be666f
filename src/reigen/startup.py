"""Start of a process in its job: from its environment to the rendezvous of the ranks, and rank 0's log of the job."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reigen.cluster.bootstrap.control import ServiceAccess, ServiceOptions, locate_service
from reigen.cluster.bootstrap.rank_lock import claim_rank
from reigen.cluster.environ import JobInfo
from reigen.cluster.host_discovery import discover_hosts
from reigen.cluster.membership.rendezvous import PrefixRendezvous, RendezvousClient
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
