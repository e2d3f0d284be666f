"""`ElasticRayExecutor`, which Horovod has deprecated, and the discovery of hosts that a cluster of Ray's has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import ConfigError
from reigen.ray.connection import require_ray
from reigen.ray.executor import Callback, RayExecutor
from reigen.ray.settings import RaySettings, count_slots


@dataclass(frozen=True, slots=True)
class ElasticRaySettings:
    """Settings of `ElasticRayExecutor.create_settings`; they can be pickled.

    Attributes:
        min_workers: least number of workers.
        max_workers: greatest; None: no limit.
        common: those of all jobs.
        reset_limit, elastic_timeout, cooldown_range: as in `RayExecutor`.
    """

    min_workers: int = 1
    max_workers: int | None = None
    common: RaySettings = field(default_factory=RaySettings)
    reset_limit: int | None = None
    elastic_timeout: float = 600
    cooldown_range: Sequence[float] | None = None


class ElasticRayExecutor:
    """Deprecated since Horovod 0.25: `RayExecutor` with ``min_workers``.

    Args:
        settings: of `create_settings`.
        use_gpu: as in `RayExecutor`.
        cpus_per_slot: its ``cpus_per_worker``.
        gpus_per_slot: its ``gpus_per_worker``.
        env_vars: variables of all workers.
        override_discovery: as in `RayExecutor`; False: the ``discovery`` of the settings is asked.

    Raises:
        ConfigError: (a ValueError) arguments contradict each other.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticRaySettings:
        """Make settings; ``min_np`` and ``max_np`` are older names of the first two.

        Of other arguments ``discovery`` and ``cooldown_range`` count, as in `RayExecutor`; the rest has no effect.
        """
        least = min_num_proc if min_np is None else min_np
        most = max_num_proc if max_np is None else max_np
        common = RaySettings(timeout_s, nics=tuple(nics) if nics else None, discovery=kwargs.get("discovery"))
        cooldown = kwargs.get("cooldown_range")
        return ElasticRaySettings(least, most, common, reset_limit, elastic_timeout, cooldown)

    def __init__(
        self,
        settings: ElasticRaySettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        warnings.warn(
            "ElasticRayExecutor is deprecated: RayExecutor(settings, min_workers=..., max_workers=...)",
            DeprecationWarning,
            stacklevel=2,
        )
        if not isinstance(settings, ElasticRaySettings):
            raise ConfigError("the settings are not of ElasticRayExecutor.create_settings()")
        self._environ = dict(env_vars or {})
        self._executor = RayExecutor(
            settings.common,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_workers,
            max_workers=settings.max_workers,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Start the workers, as `RayExecutor.start`."""
        self._executor.start(extra_env_vars=self._environ)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call ``worker_fn`` in all workers, end them, and return the results by rank."""
        try:
            return self._executor.run(worker_fn, callbacks=callbacks)
        finally:
            self._executor.shutdown()


class RayHostDiscovery:
    """Discovery of the nodes that a cluster has now, with the workers that each could have.

    Args:
        use_gpu: workers need GPUs.
        cpus_per_worker: CPUs of Ray's that a worker counts for.
        gpus_per_worker: GPUs that it counts for.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float = 1) -> None:
        self._use_gpu, self._cpus, self._gpus = use_gpu, cpus_per_worker, gpus_per_worker or 1

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each node that is alive, by its address; raises RuntimeError: Ray is not initialized."""
        nodes = require_ray().nodes()
        return count_slots(nodes, use_gpu=self._use_gpu, cpus_per_worker=self._cpus, gpus_per_worker=self._gpus)
