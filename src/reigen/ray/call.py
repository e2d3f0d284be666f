"""`run`: one function in several processes on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reigen.ray.executor import Callback, RayExecutor
from reigen.ray.settings import RaySettings
from reigen.runner.serialization import check_call


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | None = None,
    num_hosts: int | None = None,
    num_workers_per_host: int = 1,
    cpus_per_worker: float = 1,
    gpus_per_worker: int = 0,
    min_workers: int | None = None,
    max_workers: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    elastic_timeout: float = 600,
    env: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] | None = None,
    use_current_placement_group: bool = True,
    start_timeout: float = 30,
    placement_timeout: float = 100,
    network_interfaces: Sequence[str] | None = None,
    verbose: bool = False,
    num_servers: int = 0,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` in new processes on Ray's nodes that form a job, and wait for all of them.

    As `reigen.run`, but that Ray says where: ``func`` calls ``init()`` itself; output comes out here with the rank in
    front; nothing is left when this returns or raises. ``ray.init()`` is called before, by the program.

    Args:
        func: the function.
        args: its arguments, the same in all processes; ObjectRefs are resolved.
        kwargs: its keyword arguments.
        num_workers: the number of processes, which Ray packs on few nodes.
        num_hosts: or the number of nodes, of which each has
        num_workers_per_host: so many.
        cpus_per_worker: CPUs of Ray's that each counts for.
        gpus_per_worker: GPUs; all processes of a node see all GPUs of the job there.
        min_workers: makes an elastic job: workers that die are replaced, and the others go on while there are so many;
            the loop of ``func`` is in a function that ``elastic.run`` decorates.
        max_workers: the greatest number of processes of an elastic job; by default all that the cluster has places for.
        reset_limit: of an elastic job: how many changes because of failures it survives.
        cooldown_range: of an elastic job: least and greatest seconds for which a failed process's place rests.
        elastic_timeout: of an elastic job: seconds that there may be fewer than ``min_workers``.
        env: variables of all processes, above all others.
        callbacks: called with each dictionary that a process gives to `reigen.ray.ray_logger.log`.
        use_current_placement_group: take the resources of the placement group that this process is in.
        start_timeout: seconds that processes may take to start, and to meet in ``init()``.
        placement_timeout: seconds that Ray may take to give the resources.
        network_interfaces: names of interfaces through which nodes may talk to each other.
        verbose: report on stderr which processes are started, where, and why there.
        num_servers: parameter servers, which run beside the workers, on their nodes in turn; Ray counts no CPUs for
            them. Their scheduler runs beside the driver.

    Returns:
        The values that the processes returned, by rank.

    Raises:
        RuntimeError: Ray is not initialized.
        ConfigError: (a ValueError) arguments make no sense; or no node has as many GPUs as one process needs.
        TimeoutError: Ray has not given the resources in time.
        RankFailedError: as of `reigen.run`.
        LaunchError: processes cannot be started.

    Example::

        ray.init()
        losses = reigen.ray.run(train, (0.1,), num_workers=4)
    """
    check_call(func, args, kwargs)
    executor = RayExecutor(
        RaySettings(start_timeout, placement_timeout, tuple(network_interfaces or ()) or None, verbose),
        num_workers=num_workers,
        num_hosts=num_hosts,
        num_workers_per_host=num_workers_per_host,
        cpus_per_worker=cpus_per_worker,
        use_gpu=gpus_per_worker > 0,
        gpus_per_worker=gpus_per_worker or None,
        use_current_placement_group=use_current_placement_group,
        num_servers=num_servers,
        min_workers=min_workers,
        max_workers=max_workers,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        elastic_timeout=elastic_timeout,
    )
    try:
        executor.start(extra_env_vars=env)
        return executor.run(func, args, kwargs, callbacks)
    finally:
        executor.shutdown()
