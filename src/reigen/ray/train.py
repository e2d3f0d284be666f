"""Backend for Ray Train: Ray's worker processes are the ranks, and `ReigenConfig` is all that a program adds.

a. When a worker group is up, the process that controls the run starts a control service, and each worker makes a key
   pair (`key_exchange`) and says on which node it is.
b. The controller sends each worker its place, the service's address, and the job's secret, masked for this worker. The
   worker puts them where ``init()`` looks, as `reigen run` does.
c. The training function calls ``init()``. A worker that dies is seen by the others at once: what they wait for raises.
   Ray then ends them all, and starts a new group from the last checkpoint, if its FailureConfig says so.
d. Before a group is shut down its workers leave the job, and the service ends behind them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from reigen import context
from reigen.cluster.environ import RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.cluster.membership.control_service import ControlService
from reigen.errors import ConfigError
from reigen.launch.options import NetworkOptions
from reigen.ray.key_exchange import KeyPair
from reigen.ray.settings import place_ranks, rank_variables

_SECRET_BYTES = 32
#: Seconds that workers may take to leave the job before Ray ends them.
_LEAVE_SECONDS = 5.0
#: This worker's, between the two calls that bring it its secret.
_keys: list[KeyPair] = []


@dataclass
class ReigenConfig(BackendConfig):
    """Configuration of Reigen in a trainer of Ray Train's (version 2 of it).

    The training function calls ``init()``, as any rank does. A worker of Ray's is a rank; all workers of a node see all
    GPUs that the run has there, and choose by ``local_rank()``.

    Args:
        environ: variables for all workers: knobs such as REIGEN_LOG.
        elastic: survivors of a lost worker go on; not possible yet.

    Raises:
        ConfigError: (a ValueError) ``elastic`` is set.

    Example::

        trainer = DataParallelTrainer(
            train_loop_per_worker, backend_config=ReigenConfig(), scaling_config=ScalingConfig(num_workers=4)
        )
        result = trainer.fit()
    """

    environ: Mapping[str, str] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.elastic:
            raise ConfigError(
                "ReigenConfig(elastic=True): jobs whose survivors go on are not possible yet; without it Ray restarts "
                "all workers from the last checkpoint: RunConfig(failure_config=FailureConfig(max_failures=...))"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend's class."""
        return ReigenBackend

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray's dashboard may show: names of variables, and not their values."""
        return {"environ": sorted(self.environ or {}), "elastic": self.elastic}


class ReigenBackend(Backend):
    """Backend of one worker group after the other; Ray has one object of it in a process."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._service: ControlService | None = None

    def on_start(self, worker_group: Any, backend_config: ReigenConfig) -> None:
        """Bring place, address and secret to each worker of a new group."""
        self._close_service()
        environ = dict(backend_config.environ or {})
        network = NetworkOptions.from_environ({**os.environ, **environ})
        secret = secrets.token_bytes(_SECRET_BYTES)
        answers = worker_group.execute(_begin)
        address = str(ray.util.get_node_ip_address())
        self._service = ControlService(
            secret, address, 0, peer_timeout_seconds=network.peer_timeout_seconds, tls=network.make_tls()
        )
        self._service.start()
        environ[RENDEZVOUS_VARIABLE] = self._service.address
        topologies = place_ranks([node for node, _ in answers])
        refs = []
        for rank, (topology, (_, public)) in enumerate(zip(topologies, answers, strict=True)):
            keys = KeyPair()
            call = (_become_rank, environ | rank_variables(topology), keys.public, keys.mask(secret, public))
            refs.append(worker_group.execute_single_async(rank, *call))
        try:
            ray.get(refs)
        except BaseException:
            self._close_service()
            raise

    def on_shutdown(self, worker_group: Any, backend_config: ReigenConfig) -> None:
        """Let all workers leave the job that are still there, and end its service."""
        with suppress(ray.exceptions.RayError):  # those that have died have left
            refs = worker_group.execute_async(context.shutdown)
            ray.wait(refs, num_returns=len(refs), timeout=_LEAVE_SECONDS)
        self._close_service()

    def _close_service(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.close()


def _begin() -> tuple[str, int]:
    """In a worker: make its keys; returns the node's id and the public key."""
    keys = KeyPair()
    _keys[:] = [keys]
    return ray.get_runtime_context().get_node_id(), keys.public


def _become_rank(environ: Mapping[str, str], public: int, masked: bytes) -> None:
    """In a worker: make it a rank, for the ``init()`` that follows."""
    keys = _keys.pop()
    os.environ.update(environ)
    os.environ[SECRET_VARIABLE] = keys.mask(masked, public).hex()
