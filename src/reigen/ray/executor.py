"""`RayExecutor`: Horovod's interface to a job whose workers stay, on a cluster of Ray's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reigen.errors import ConfigError, LaunchError
from reigen.ray.connection import require_ray
from reigen.ray.job import ExecutorJob, make_job
from reigen.ray.job_request import Call, JobRequest
from reigen.ray.settings import RaySettings, check_gpus, request_elastic, request_workers
from reigen.runner.options import check_num_servers
from reigen.runner.serialization import check_call

Callback = Callable[[Any], object]


class RayExecutor:
    """Workers on a Ray cluster, that form one job and run functions, one after the other.

    Each function calls ``init()`` itself, as a script does; a second call of it in the same worker does nothing. The
    workers are not Ray's own, but children of an agent beneath one actor a node: ``ray.get`` and its like do not work
    in them. References to objects (ObjectRef) in arguments are resolved in the driver.

    Args:
        settings: of `create_settings`; None for its defaults.
        num_workers: how many; Ray packs them on few nodes.
        num_hosts: on how many nodes, instead; each has
        num_workers_per_host: so many.
        cpus_per_worker: CPUs of Ray's that each counts for.
        use_gpu: each worker needs GPUs. All workers of a node see all GPUs that the job has there, and choose by
            ``local_rank()``.
        gpus_per_worker: how many, by default 1.
        use_current_placement_group: if this process is in a placement group (a trial of Ray Tune), use its resources.
        min_workers: makes elastic jobs, of which each call of a function is one: workers that die, or whose node goes,
            are replaced, and the others go on while there are so many. The function's loop is
            in one that ``elastic.run`` decorates.
        max_workers: the greatest number of workers; by default all that the cluster has places for. Ray is asked for
            so many from the beginning; `start` waits for ``min_workers``.
        reset_limit: how many changes because of failures a job survives.
        cooldown_range: least and greatest seconds for which a failed worker's place rests; by default 10 s, doubled
            each time, and after three failures in ten minutes the place is given up.
        elastic_timeout: seconds that there may be fewer than ``min_workers``.
        override_discovery: let Ray say which nodes are used; else ``settings.discovery`` does, an object as
            `RayHostDiscovery`, which is asked each second.
        num_servers: parameter servers, which run beside the workers, on their nodes in turn; Ray counts no CPUs for
            them. Their scheduler runs beside the driver. A store that a function makes it closes, too: the job of the
            servers ends with that of the workers. Not in elastic jobs.

    Raises:
        ConfigError: (a ValueError) arguments contradict each other.

    Example::

        ray.init(address="auto")
        executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=4, use_gpu=True)
        executor.start()
        losses = executor.run(train, args=[0.1])
        executor.shutdown()
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> RaySettings:
        """Make settings.

        Args:
            timeout_s: seconds that workers may take to start, and to meet in ``init()``.
            ssh_identity_file: no effect: nothing goes by ssh.
            ssh_str: no effect.
            placement_group_timeout_s: seconds that Ray may take to give the resources.
            nics: names of network interfaces through which nodes may talk to each other.
        """
        return RaySettings(timeout_s, placement_group_timeout_s, tuple(nics) if nics else None)

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        num_servers: int = 0,
    ) -> None:
        self._settings = settings if settings is not None else RaySettings()
        self._request = request_workers(
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_workers_per_host=num_workers_per_host,
            cpus_per_worker=cpus_per_worker,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_worker,
            min_workers=min_workers,
            max_workers=max_workers,
        )
        self._max_workers = max_workers
        self._elastic = request_elastic(
            min_workers=min_workers,
            max_workers=max_workers,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
            elastic_timeout=elastic_timeout,
        )
        self._discovery = None if override_discovery else self._settings.discovery
        if self._elastic is not None and not override_discovery and self._discovery is None:
            raise ConfigError("override_discovery=False needs settings.discovery, which says what hosts there are")
        self._use_current_group, self._num_servers = (
            use_current_placement_group,
            check_num_servers(num_servers, self._elastic is not None),
        )
        self._job: ExecutorJob | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers of the job; of an elastic one, the least."""
        return self._request.num_workers

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Get the resources from Ray and start the workers.

        Args:
            executable_cls: makes an object in each worker, which `execute` hands to its functions.
            executable_args: its arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: variables of all workers.

        Raises:
            RuntimeError: Ray is not initialized; or the workers were started before.
            ConfigError: no node of the cluster has as many GPUs as one worker (or host) needs.
            TimeoutError: Ray has not given the resources in time; says what was asked for and what there is.
            LaunchError: workers cannot be started: a line for each host.
            RankFailedError: ``executable_cls`` raised.
        """
        if self._job is not None:
            raise LaunchError("the workers are started: shutdown() comes before another start()")
        ray = require_ray()
        check_gpus(self._request, ray.nodes())
        state = None
        if executable_cls is not None:
            state = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
        environ = {name: str(text) for name, text in (extra_env_vars or {}).items()}
        elastic = self._elastic, self._max_workers, self._discovery
        of_all = self._request, self._settings, self._use_current_group, environ, state
        job = make_job(JobRequest(*of_all, *elastic, num_servers=self._num_servers))
        job.start()
        self._job = job

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in all workers and wait for it.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            callbacks: called in the driver with each dictionary that a worker gives to `reigen.ray.ray_logger.log`.

        Returns:
            The results, by rank.

        Raises:
            RankFailedError: a worker raised, exited or was killed, the first one that failed by itself; or its node was
                lost. Its ``__cause__`` is the worker's exception.
        """
        return self._started.run(Call(*check_call(fn, args, kwargs)), callbacks or ())

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` in all workers; returns an ObjectRef of each result, by rank, at once.

        Raises:
            UnsupportedError: (a NotImplementedError) the job is elastic: the number of results is known at its end.
        """
        return self._started.refs(Call(*check_call(fn, args, kwargs)))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call ``fn`` in all workers with the object that ``executable_cls`` has made there, by rank."""
        return self._started.run(Call(fn, with_state=True), callbacks or ())

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn`` with the object of ``executable_cls`` in the worker of rank 0 alone; returns its result.

        With ``min_workers`` that is a job of one worker.
        """
        return self._started.run_single(Call(fn, with_state=True, ranks=(0,)))

    @property
    def _started(self) -> ExecutorJob:
        if self._job is None:
            raise LaunchError("there are no workers: start() comes first")
        return self._job

    def shutdown(self) -> None:
        """End the workers and give the resources back; may be called again, and before `start`."""
        job, self._job = self._job, None
        if job is not None:
            job.shutdown()
