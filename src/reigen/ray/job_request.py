"""Requests for jobs on Ray, and calls of functions in their ranks. Ray is not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reigen.launch.elastic.options import ElasticOptions
from reigen.ray.settings import PlacementRequest, RaySettings
from reigen.runner.engine_jobs import EngineJobOptions

#: Seconds that the others have to end a function that has failed in one rank, and to end at all.
_GRACE_SECONDS = 1.5


class HostFinder(Protocol):
    """Horovod's discovery of hosts."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the slots of each host that may be used now, by its name or address."""


@dataclass(frozen=True)
class JobRequest:
    """Request for a job; it can be pickled.

    Attributes:
        workers: that are asked of Ray.
        settings: of the job.
        use_current_group: take the placement group that the driver is in.
        environ: variables of all ranks.
        state: class, arguments and keyword arguments of an object that each rank makes; None: none.
        elastic: what makes the job elastic; None: it is not.
        max_workers: of an elastic job; None: as many as the cluster has places for.
        discovery: of an elastic job: says which hosts are used; None: Ray does.
        num_servers: parameter servers beside the ranks.
    """

    workers: PlacementRequest
    settings: RaySettings
    use_current_group: bool = True
    environ: Mapping[str, str] | None = None
    state: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
    elastic: ElasticOptions | None = None
    max_workers: int | None = None
    discovery: HostFinder | None = None
    num_servers: int = 0


@dataclass(frozen=True)
class Call:
    """Call of a function in ranks; ``ranks`` None: in all. ``with_state``: it gets the rank's object first."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    with_state: bool = False
    ranks: tuple[int, ...] | None = None


def job_options(request: JobRequest) -> EngineJobOptions:
    """Return the options of the job, as engines know them."""
    settings = request.settings
    return EngineJobOptions(
        num_ranks=request.workers.num_workers,
        environ=request.environ,
        start_timeout_seconds=settings.timeout_seconds,
        verbose=settings.verbose,
        grace_seconds=_GRACE_SECONDS,
        network_interfaces=",".join(settings.nics) if settings.nics else None,
        num_servers=request.num_servers,
    )
