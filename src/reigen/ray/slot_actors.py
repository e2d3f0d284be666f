"""Actors of an elastic job on Ray: one for each slot, on whatever nodes have the resources, as long as the job runs.

a. `SlotActors.discover` asks Ray for as many actors as there may be ranks, and again for those that have died. Ray
   places each by itself, now or when there is a node for it: an autoscaler sees what is missing.
b. An actor that has been placed is a slot of its node. It is seen to die by a call of it that lasts as long as it does.
c. One actor of each node keeps the agent (`start_agents`), which may have ranks in all slots of the node. Where the
   agent ends, or its actor dies, the node's other slots stay, and another actor may be called.
d. `release` ends the actors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reigen.launch.agent.gathering import unique_name
from reigen.ray.agents import KEPT_VARIABLES, AgentActor, explain_agent_end
from reigen.ray.settings import (
    Place,
    PlacementRequest,
    check_gpus,
    count_slots,
    explain_timeout,
    order_gpus,
)
from reigen.runner.engine_jobs import EngineAgents, EngineHost

#: Seconds between two looks in `SlotActors.start`, and until actors that could not be started are asked for again.
_LOOK_SECONDS, _AGAIN_SECONDS = 0.2, 5.0
#: Seconds that agents may take to end.
_LAST_SECONDS = 3.0


class HoldingActor(AgentActor):
    """Actor of one slot."""

    def hold(self) -> None:
        """Return when the actor ends, and never before."""
        self.held.wait()


@dataclass(eq=False)
class _Slot:
    """Actor that Ray was asked for: where it is, once that is known, and the node that it was asked for, if any."""

    actor: Any
    placing: Any
    holding: Any
    node: str = ""
    place: Place | None = None


class SlotActors:
    """Slots of one elastic job.

    Args:
        request: of one worker.
        min_slots: without which nothing begins.
        max_slots: wanted; None: all that the cluster has.
        timeout_seconds: for the first ``min_slots``.
        use_current_group: take the resources of the placement group that this process is in, if there is one.
        find_hosts: returns the slots to use, by the host's name or address; None: Ray's own choice.
    """

    def __init__(
        self,
        request: PlacementRequest,
        min_slots: int,
        max_slots: int | None,
        timeout_seconds: float,
        *,
        use_current_group: bool = True,
        find_hosts: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._request, self._min_slots, self._max_slots = request, min_slots, max_slots
        self._timeout_seconds, self._use_current_group = timeout_seconds, use_current_group
        self._find_hosts = find_hosts
        self._slots: list[_Slot] = []
        #: Name of each node that has slots, or had some.
        self._names: dict[str, str] = {}
        self._kept: tuple[str, ...] = KEPT_VARIABLES
        #: The calls that last as long as their agents, and their slots, by the name of the node.
        self._serving: dict[str, tuple[Any, _Slot]] = {}
        self._asked_at = 0.0
        self._has_failed = False

    def start(self) -> EngineAgents:
        """Ask Ray for the actors, and wait for the least number of them.

        Raises:
            ConfigError: no node has the GPUs of a worker.
            TimeoutError: Ray has not given them in time.
        """
        import ray

        if self._find_hosts is None:
            check_gpus(self._request, ray.nodes())
        deadline = time.monotonic() + self._timeout_seconds
        try:
            while True:
                hosts = self.discover()
                if sum(host.slots for host in hosts) >= self._min_slots:
                    break
                if time.monotonic() >= deadline:
                    total, available = ray.cluster_resources(), ray.available_resources()
                    raise TimeoutError(explain_timeout(self._request, self._timeout_seconds, available, total))
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            self.release()
            raise
        return EngineAgents(
            "Ray",
            hosts,
            self.start_agents,
            self.explain_exit,
            kept_variables=self._kept,
            listen_towards=hosts[0].address,
            discover=self.discover,
        )

    def discover(self) -> list[EngineHost]:
        """Return the nodes that have slots, in the order in which they had the first, and ask for missing actors."""
        import ray

        self._look(ray)
        wanted = None if self._find_hosts is None else self._find_nodes(ray, self._find_hosts())
        self._ask(ray, wanted)
        found = []
        for node, slots in self._by_node().items():
            num = len(slots) if wanted is None else min(len(slots), wanted.get(node, 0))
            places = [slot.place for slot in slots if slot.place is not None]
            if num:
                found.append(EngineHost(self._names[node], num, places[0].address, self._variables(places)))
        return found

    def _variables(self, places: Iterable[Place]) -> dict[str, str]:
        if not self._request.gpus_per_worker:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(order_gpus(gpu for place in places for gpu in place.gpus))}

    def _by_node(self) -> dict[str, list[_Slot]]:
        nodes: dict[str, list[_Slot]] = {node: [] for node in self._names}
        for slot in self._slots:
            if slot.place is not None:
                nodes.setdefault(slot.place.node, []).append(slot)
        return {node: slots for node, slots in nodes.items() if slots}

    # ---------------------------------------------------------------- actors

    def _look(self, ray: Any) -> None:
        """Find the actors that have been placed, and those that have died."""
        if not self._slots:
            return
        holding = [slot.holding for slot in self._slots]
        dead, _ = ray.wait(holding, num_returns=len(holding), timeout=0)
        self._has_failed |= any(slot.holding in dead and slot.place is None for slot in self._slots)
        self._slots = [slot for slot in self._slots if slot.holding not in dead]
        placing = {slot.placing: slot for slot in self._slots if slot.place is None}
        if not placing:
            return
        ready, _ = ray.wait(list(placing), num_returns=len(placing), timeout=0)
        for ref in ready:
            with suppress(ray.exceptions.RayError):  # it has died, which the next look sees
                placing[ref].place, names = ray.get(ref)
                self._kept = tuple(dict.fromkeys((*self._kept, *names)))
                self._name(placing[ref].place)

    def _name(self, place: Place | None) -> None:
        """Name a node that has its first slot; names of nodes without any are free again."""
        assert place is not None, "just found"
        if place.node not in self._names or len(self._by_node().get(place.node, ())) == 1:
            self._names.pop(place.node, None)
            taken = {self._names[node] for node in self._by_node() if node in self._names and node != place.node}
            self._names = {node: name for node, name in self._names.items() if name in taken}
            self._names[place.node] = unique_name(place.hostname, taken)

    def _find_nodes(self, ray: Any, hosts: Mapping[str, int]) -> dict[str, int]:
        """Return slots by Ray's ids of nodes; hosts that the cluster does not have now are left out."""
        found = {}
        for node in ray.nodes():
            names = node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName", "")
            num = next((hosts[name] for name in names if name in hosts), 0)
            if node["Alive"] and num:
                found[str(node["NodeID"])] = int(num)
        return found

    def _ask(self, ray: Any, wanted: Mapping[str, int] | None) -> None:
        """Ask Ray for the actors that are missing, and let go of those that are not wanted any more."""
        if self._has_failed:  # not again and again
            if time.monotonic() < self._asked_at + _AGAIN_SECONDS:
                return
            self._has_failed = False
        self._asked_at = time.monotonic()
        if wanted is None:
            for _ in range(self._num_wanted(ray) - len(self._slots)):
                self._slots.append(self._start_actor(ray))
            return
        serving = {id(slot) for _, slot in self._serving.values()}
        for slot in list(self._slots):  # an agent's actor stays until its ranks have left
            if slot.node not in wanted and id(slot) not in serving:
                self._slots.remove(slot)
                ray.kill(slot.actor)
        for node, num in wanted.items():
            num_more = num - sum(slot.node == node for slot in self._slots)
            if self._max_slots is not None:
                num_more = min(num_more, self._max_slots - len(self._slots))
            for _ in range(num_more):
                self._slots.append(self._start_actor(ray, node))

    def _num_wanted(self, ray: Any) -> int:
        if self._max_slots is not None:
            return self._max_slots
        request = self._request
        slots = count_slots(
            ray.nodes(),
            use_gpu=request.gpus_per_worker > 0,
            cpus_per_worker=request.cpus_per_worker,
            gpus_per_worker=request.gpus_per_worker or 1,
        )
        return max(self._min_slots, sum(slots.values()))

    def _start_actor(self, ray: Any, node: str = "") -> _Slot:
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        group = get_current_placement_group() if self._use_current_group else None
        strategy: Any = "DEFAULT"
        if node:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        elif group is not None:
            strategy = PlacementGroupSchedulingStrategy(group, -1)
        resources = self._request.bundle
        actor = (
            ray.remote(HoldingActor)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            .remote(1)
        )
        return _Slot(actor, actor.place.remote(), actor.hold.remote(), node)

    # ---------------------------------------------------------------- agents

    def start_agents(self, calls: Mapping[str, str]) -> None:
        """Have the agents of these nodes started; returns at once.

        Raises:
            LaunchError: a node has no slots any more, and nothing can be said to its agent.
        """
        nodes = {name: node for node, name in self._names.items()}
        by_node = self._by_node()
        for name, text in calls.items():
            slots = by_node.get(nodes.get(name, ""), [])
            if not slots:
                continue  # its agent does not come, and the launcher calls it again if it is still there
            self._serving[name] = slots[0].actor.serve.remote(text), slots[0]

    def explain_exit(self, name: str) -> str:
        """Explain in one line why the agent of a node has ended; empty while it runs."""
        import ray

        if name not in self._serving or not ray.is_initialized():
            return ""
        serving, _ = self._serving[name]
        return explain_agent_end(ray, serving)

    def release(self) -> None:
        """End the actors."""
        import ray

        slots, self._slots = self._slots, []
        serving, self._serving = self._serving, {}
        if not ray.is_initialized():
            return  # all of it has ended with the connection
        if serving:
            with suppress(ray.exceptions.RayError):
                ray.wait([ref for ref, _ in serving.values()], num_returns=len(serving), timeout=_LAST_SECONDS)
        for slot in slots:
            with suppress(Exception):  # it has died
                ray.kill(slot.actor)
