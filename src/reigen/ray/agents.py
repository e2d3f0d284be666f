"""Actors of a job on Ray: one on each node, beneath which Reigen's agent runs.

An actor starts the agent as a child process, and the agent starts the ranks: an actor that was a rank itself would die
with the interpreter of Ray's worker, and nobody could sweep behind it. What an actor gets by Ray's RPC, which anybody
on the way can read unless Ray's TLS is on, is a ticket for one connection; the job's secret never goes that way.

a. `Placement.allocate` makes a placement group, or takes the one that it is in, and starts the actors: in a group of
   its own one a node, for the other bundles of the node are the job's anyway; with GPUs, or in another's group, one a
   bundle, since only an actor that has taken a bundle knows its GPUs, and keeps others from taking it.
b. `start_agents` sends the tickets. The call lasts as long as the agent: its end, or Ray's word about the actor, is
   what `explain_exit` reads.
c. `release` ends the actors, and removes the group. It may be called at any time, and again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import LaunchError
from reigen.ray.settings import (
    NodeSeats,
    Place,
    PlacementRequest,
    check_gpus,
    explain_death,
    explain_timeout,
    group_by_node,
)
from reigen.runner.agent_process import AgentProcess
from reigen.runner.engine_jobs import EngineAgents, EngineHost

#: Beginnings of names of variables of which a node's own value wins; those of ``runtime_env`` come on top.
KEPT_VARIABLES = ("RAY_", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_", "CUDA_VISIBLE_DEVICES")
#: Seconds that agents may take to end, and Ray to remove a group.
_LAST_SECONDS = 3.0
_POLL_SECONDS = 0.02


class AgentActor:
    """Actor on a node: says where it is, and keeps an agent. One without an agent holds its bundle."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._agent: AgentProcess | None = None
        #: Set by nobody: what waits for it lasts as long as the actor.
        self.held = threading.Event()

    def place(self) -> tuple[Place, tuple[str, ...]]:
        """Return where this is, and the names of the variables that the runtime environment sets."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        place = Place(context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname(), self._slots, gpus)
        return place, tuple(context.runtime_env.get("env_vars") or ())

    def serve(self, dial_text: str) -> tuple[int | None, str]:
        """Run an agent, which dials back, until it ends; returns its exit code and its last output."""
        self._agent = AgentProcess(dial_text)
        code = self._agent.wait()
        return code, self._agent.output

    def stop(self) -> None:
        """End the agent, and with it the ranks here."""
        if self._agent is not None:
            self._agent.stop()

    def pid(self) -> int:
        """Process id of the actor's worker."""
        return os.getpid()


@dataclass
class Placement:
    """Resources and actors of one job.

    Attributes:
        request: what is asked of Ray.
        timeout_seconds: for the resources, and once more for the actors.
        use_current_group: take the placement group that this process is in, if there is one.
    """

    request: PlacementRequest
    timeout_seconds: float
    use_current_group: bool = True
    _group: Any = None
    _owns_group: bool = False
    _actors: list[Any] = field(default_factory=list)
    _nodes: list[NodeSeats] = field(default_factory=list)
    _kept: tuple[str, ...] = KEPT_VARIABLES
    #: The calls that last as long as their agents, by the name of the node.
    _serving: dict[str, Any] = field(default_factory=dict)

    def allocate(self) -> EngineAgents:
        """Get the resources and the actors.

        Raises:
            ConfigError: no node has the GPUs of a bundle.
            TimeoutError: Ray has not given them in time.
            LaunchError: an actor cannot be started.
        """
        import ray

        check_gpus(self.request, ray.nodes())
        try:
            self._find_group(ray)
            self._actors = self._start_actors(ray)
            found = self._wait_for_places(ray)
            self._nodes = group_by_node([place for place, _ in found])
            self._kept = (*KEPT_VARIABLES, *sorted({name for _, names in found for name in names}))
        except BaseException:
            self.release()
            raise
        hosts = [EngineHost(node.name, node.slots, node.address, self._variables(node)) for node in self._nodes]
        return EngineAgents("Ray", hosts, self.start_agents, self.explain_exit, kept_variables=self._kept)

    def _variables(self, node: NodeSeats) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(node.gpus)} if self.request.gpus_per_worker else {}

    # ---------------------------------------------------------------- resources

    def _find_group(self, ray: Any) -> None:
        from ray.util import get_current_placement_group, placement_group

        current = get_current_placement_group() if self.use_current_group else None
        if current is not None:
            self._group = current
            return
        request = self.request
        self._owns_group = True
        self._group = placement_group([request.bundle] * request.num_bundles, strategy=request.strategy)
        if not self._group.wait(timeout_seconds=self.timeout_seconds):
            raise TimeoutError(self._explain_timeout(ray))

    def _explain_timeout(self, ray: Any) -> str:
        total, available = ray.cluster_resources(), ray.available_resources()
        return explain_timeout(self.request, self.timeout_seconds, available, total)

    def _start_actors(self, ray: Any) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(AgentActor)
        resources = self.request.bundle
        actors = []
        for bundle, slots in self._choose_bundles(ray):
            options = actor_class.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            actors.append(options.remote(slots))
        return actors

    def _choose_bundles(self, ray: Any) -> list[tuple[int, int]]:
        """Choose where actors go: each a bundle (-1: any) and the workers that it stands for."""
        request = self.request
        if not self._owns_group:
            return [(-1, request.workers_per_bundle)] * request.num_bundles
        if request.gpus_per_worker:
            return [(bundle, request.workers_per_bundle) for bundle in range(request.num_bundles)]
        nodes = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        bundles: dict[str, list[int]] = {}
        for bundle in range(request.num_bundles):
            bundles.setdefault(nodes[bundle], []).append(bundle)
        return [(each[0], len(each) * request.workers_per_bundle) for each in bundles.values()]

    def _wait_for_places(self, ray: Any) -> list[tuple[Place, tuple[str, ...]]]:
        refs = [actor.place.remote() for actor in self._actors]
        try:
            found: list[tuple[Place, tuple[str, ...]]] = ray.get(refs, timeout=self.timeout_seconds)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(self._explain_timeout(ray)) from None
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray cannot start an actor for the ranks: {explain_death(str(error))}") from error
        return found

    # ---------------------------------------------------------------- agents

    def start_agents(self, calls: Mapping[str, str]) -> None:
        """Have the agents of these nodes started; returns at once."""
        for node in self._nodes:
            if node.name in calls:
                self._serving[node.name] = self._actors[node.actors[0]].serve.remote(calls[node.name])

    def explain_exit(self, name: str) -> str:
        """Explain in one line why the agent of a node has ended; empty while it runs."""
        import ray

        serving = self._serving.get(name)
        if serving is None or not ray.is_initialized():
            return ""
        return explain_agent_end(ray, serving)

    def pids(self, ray: Any) -> list[int]:
        """Process ids of the actors' workers."""
        found: list[int] = ray.get([actor.pid.remote() for actor in self._actors])
        return found

    def release(self) -> None:
        """End the actors, and give the resources back."""
        import ray

        actors, self._actors = self._actors, []
        group, self._group = self._group, None
        if not ray.is_initialized():
            return  # all of it has ended with the connection
        if self._serving:
            with suppress(ray.exceptions.RayError):
                ray.wait(list(self._serving.values()), num_returns=len(self._serving), timeout=_LAST_SECONDS)
        self._serving.clear()
        for actor in actors:
            with suppress(Exception):  # it has died
                ray.kill(actor)
        if self._owns_group and group is not None:
            with suppress(Exception):  # its owner has gone, and Ray has removed it
                ray.util.remove_placement_group(group)
                _wait_until_removed(ray, group)


def explain_agent_end(ray: Any, serving: Any) -> str:
    """Explain in one line why an agent has ended, by the reference of `AgentActor.serve`; empty while it runs."""
    ready, _ = ray.wait([serving], timeout=0)
    if not ready:
        return ""
    try:
        code, output = ray.get(serving)
    except ray.exceptions.RayError as error:
        return explain_death(str(error))
    last = output.strip().rpartition("\n")[2]
    return f"the agent has ended with exit code {code}{last and ': '}{last}"


def _wait_until_removed(ray: Any, group: Any) -> None:
    until = time.monotonic() + _LAST_SECONDS
    while ray.util.placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
