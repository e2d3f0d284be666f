"""Processes of an elastic job on one host: their environment, and the memory of its voter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from reigen.cluster.environ import (
    CANDIDATE_VARIABLE,
    ELASTIC_TIMEOUT_VARIABLE,
    ELASTIC_VARIABLE,
    HANDOVER_VARIABLE,
    INCARNATION_VARIABLE,
    MAX_SERVERS_VARIABLE,
    MAX_SIZE_VARIABLE,
    MIN_SIZE_VARIABLE,
    RANK_VARIABLES,
    SERVER_CONTROL_VARIABLE,
    SLOT_VARIABLE,
    STRAGGLER_VARIABLE,
    VOTER_FD_VARIABLE,
    WARM_SPARES_VARIABLE,
    WITNESS_VARIABLE,
)
from reigen.cluster.topology import Topology
from reigen.launch.elastic.job import SlotStart
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.hosts import HostAssignment
from reigen.launch.local_plan import (
    PER_RANK_VARIABLES,
    JobServices,
    ProcessOptions,
    ProcessSpec,
    plan_host,
    replace_variables,
)
from reigen.launch.ps_processes import WORKER_LOSS_VARIABLE

#: Size of the memory of a machine's voter.
VOTER_BYTES = 128 << 10
_ELASTIC_VARIABLES = frozenset(
    {
        CANDIDATE_VARIABLE,
        ELASTIC_TIMEOUT_VARIABLE,
        ELASTIC_VARIABLE,
        HANDOVER_VARIABLE,
        INCARNATION_VARIABLE,
        MAX_SERVERS_VARIABLE,
        MAX_SIZE_VARIABLE,
        MIN_SIZE_VARIABLE,
        SERVER_CONTROL_VARIABLE,
        SLOT_VARIABLE,
        STRAGGLER_VARIABLE,
        VOTER_FD_VARIABLE,
        WARM_SPARES_VARIABLE,
        WITNESS_VARIABLE,
        "HOROVOD_ELASTIC",
        "HOROVOD_HOSTNAME",
    }
)


@dataclass(frozen=True, slots=True)
class PlacedStart:
    """Process to start on this host.

    Attributes:
        place: its number among the places of the machine, which share its processors and GPUs.
        slot: its number in the job.
        topology: its place in the first view; None: it is a candidate.
        variables: of its own; None removes one.
    """

    place: int
    slot: int
    topology: Topology | None
    variables: dict[str, str | None] = field(default_factory=dict)


def without_elastic_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of an elastic job that this process may be part of."""
    return {
        name: text
        for name, text in environ.items()
        if name not in _ELASTIC_VARIABLES and (name, text) != (WORKER_LOSS_VARIABLE, "elastic")
    }


def place_starts(
    starts: Sequence[SlotStart], options: ElasticOptions, place_offsets: Mapping[str, int]
) -> list[PlacedStart]:
    """Return the processes to start, with what their environments say of them, in the order of ``starts``.

    Args:
        starts: all that start at this moment; where they are the first view, all of it.
        options: of the job.
        place_offsets: number of each host's first place on its machine.
    """
    return [
        PlacedStart(
            place_offsets[start.host] + start.local_rank,
            start.slot,
            _first_topology(start, starts) if start.first_size else None,
            _variables(start, options),
        )
        for start in starts
    ]


def _first_topology(start: SlotStart, starts: Sequence[SlotStart]) -> Topology:
    """Return the place of a process in the first view, whose members are ``starts``."""
    hosts: dict[str, list[int]] = {}
    for each in starts:
        hosts.setdefault(each.host, []).append(each.slot)
    local_rank = hosts[start.host].index(start.slot)
    having = [name for name, slots in hosts.items() if len(slots) > local_rank]
    return Topology(start.slot, len(starts), local_rank, len(hosts[start.host]), having.index(start.host), len(having))


def _variables(start: SlotStart, options: ElasticOptions) -> dict[str, str | None]:
    variables: dict[str, str | None] = {
        ELASTIC_VARIABLE: "1",
        SLOT_VARIABLE: str(start.slot),
        INCARNATION_VARIABLE: str(start.incarnation),
        MIN_SIZE_VARIABLE: str(options.min_ranks),
        MAX_SIZE_VARIABLE: str(options.max_members),
        ELASTIC_TIMEOUT_VARIABLE: f"{options.timeout_seconds:g}",
        STRAGGLER_VARIABLE: str(options.stragglers),
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": start.host,
        "HOROVOD_LOCAL_RANK": str(start.local_rank),
    }
    if options.has_warm_spares:
        variables[WARM_SPARES_VARIABLE] = str(options.spares)
    if options.witness:
        variables[WITNESS_VARIABLE] = options.witness
    return variables if start.first_size else {**variables, CANDIDATE_VARIABLE: "1"}


def plan_starts(
    starts: Sequence[PlacedStart],
    num_places: int,
    options: ProcessOptions,
    services: JobServices,
    environ: Mapping[str, str],
    voter: int,
) -> list[ProcessSpec]:
    """Plan processes of this host; their shares of it do not depend on how many run at a time.

    Args:
        starts: the processes.
        num_places: how many there may be at a time.
        options: of the job.
        services: of the launcher.
        environ: inherited by them.
        voter: descriptor of `make_voter_memory`.

    Raises:
        ConfigError: no such binding, or too few GPUs.
    """
    num_places = max([num_places, *(start.place + 1 for start in starts)])
    places = HostAssignment("", True, tuple(Topology.on_one_host(place, num_places) for place in range(num_places)))
    specs, _ = plan_host(places, options, services, without_elastic_variables(environ))
    return [_fill(specs[start.place], start, voter) for start in starts]


def _fill(spec: ProcessSpec, start: PlacedStart, voter: int) -> ProcessSpec:
    of_ranks = PER_RANK_VARIABLES if start.topology is None else frozenset[str]()
    environ = {name: text for name, text in spec.environ.items() if name not in of_ranks}
    topology = start.topology or Topology(start.slot, start.slot + 1, 0, 1, 0, 1)
    if start.topology is not None:
        texts = map(str, astuple(start.topology))
        variables = dict(zip(RANK_VARIABLES, texts, strict=True))
        environ |= variables | {name.replace("REIGEN_", "HOROVOD_"): text for name, text in variables.items()}
    environ.pop("DMLC_TASK_ID", None)  # the servers' scheduler knows which numbers are free
    environ = replace_variables(environ, start.variables) | {VOTER_FD_VARIABLE: str(voter)}
    return replace(spec, topology=topology, environ=environ, descriptors=(*spec.descriptors, voter))


def make_voter_memory() -> int:
    """Make the memory of a host's voter, which its processes inherit; returns its descriptor."""
    descriptor = os.memfd_create("reigen-voter", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, VOTER_BYTES)
    return descriptor
