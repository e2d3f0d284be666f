"""Nodes of a job on Kubernetes, by the variables that controllers give their pods.

Kubernetes itself tells a pod its index, but not how many pods there are: REIGEN_NODES does, which the manifest has to
set. /etc/hosts of a pod with a subdomain, which the kubelet writes, has the pod's full name, from which the leader's
follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reigen.errors import ConfigError
from reigen.launch.local_plan import detect_cpus
from reigen.launch.nodes.sources import NodeJob, ReadFile
from reigen.launch.nodes.variables import check_index, count_gpus, read_number

#: Number of pods of the job, in manifests.
NODES_VARIABLE = "REIGEN_NODES"
#: Number of this pod, where the controller does not say it, or counts otherwise.
INDEX_VARIABLE = "REIGEN_NODE_INDEX"
#: Name by which the others reach node 0, where it cannot be derived.
LEADER_VARIABLE = "REIGEN_LEADER"
#: Seconds from SIGTERM to SIGKILL (terminationGracePeriodSeconds), which no pod can find out.
GRACE_VARIABLE = "REIGEN_GRACE"
#: Where the Secret is mounted, in manifests of ours.
SECRET_FILE = "/var/run/reigen/secret"
#: Grace of a pod whose manifest says nothing.
_DEFAULT_GRACE_SECONDS = 30.0
_ORDINAL = re.compile(r"(?P<base>.*\S)-(?P<ordinal>\d+)")
#: Variables of a node that would be taken for a rank's by what looks for its place in a job.
_DESCRIBES_NODE = re.compile(
    r"PET_.*|JOB_COMPLETION_INDEX|JAX_(NUM_PROCESSES|PROCESS_ID|COORDINATOR_ADDRESS)"
    r"|LWS_(LEADER_ADDRESS|GROUP_SIZE|WORKER_INDEX)|REIGEN_(NODES|NODE_INDEX|LEADER|SECRET_FILE)"
)


@dataclass(frozen=True, slots=True)
class _Pod:
    """Names of this pod: its host name, what stands before the number there, the number, and the domain behind it."""

    host: str
    base: str
    ordinal: int | None
    domain: str


def find_train_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the nodes of a Kubeflow TrainJob (or PyTorchJob) with the torch policy: PET_*."""
    if "PET_NNODES" not in environ and "PET_NODE_RANK" not in environ:
        return None
    size, index = _parse_pet_nodes(environ), read_number(environ, "PET_NODE_RANK")
    leader = environ.get(LEADER_VARIABLE) or environ.get("PET_MASTER_ADDR", "")
    if not leader and size > 1:
        raise ConfigError("PET_MASTER_ADDR is not set: nothing says how to reach node 0")
    found = _make_job(environ, read_file, "Kubeflow TrainJob", ("PET_NODE_RANK", index), ("PET_NNODES", size), leader)
    return replace(found, slots=_parse_pet_processes(environ))


def find_jax_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the nodes of a Kubeflow TrainJob with the jax policy: JAX_*, a process of JAX's for each node."""
    if "JAX_NUM_PROCESSES" not in environ or "JAX_PROCESS_ID" not in environ:
        return None
    size, index = read_number(environ, "JAX_NUM_PROCESSES", 1), read_number(environ, "JAX_PROCESS_ID")
    host = re.sub(r":\d+$", "", environ.get("JAX_COORDINATOR_ADDRESS", "")).strip("[]")
    leader = environ.get(LEADER_VARIABLE) or host
    if not leader and size > 1:
        raise ConfigError("JAX_COORDINATOR_ADDRESS is not set: nothing says how to reach node 0")
    numbers = ("JAX_PROCESS_ID", index), ("JAX_NUM_PROCESSES", size)
    return _make_job(environ, read_file, "Kubeflow TrainJob (jax)", *numbers, leader)


def find_leader_worker_set(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the pods of a group of a LeaderWorkerSet: LWS_*."""
    if "LWS_GROUP_SIZE" not in environ and "LWS_LEADER_ADDRESS" not in environ:
        return None
    size, index = read_number(environ, "LWS_GROUP_SIZE", 1), read_number(environ, "LWS_WORKER_INDEX")
    leader = environ.get(LEADER_VARIABLE) or environ.get("LWS_LEADER_ADDRESS", "")
    if not leader:
        raise ConfigError("LWS_LEADER_ADDRESS is not set: nothing says how to reach node 0")
    numbers = ("LWS_WORKER_INDEX", index), ("LWS_GROUP_SIZE", size)
    return _make_job(environ, read_file, "LeaderWorkerSet", *numbers, leader)


def find_indexed_job(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the pods of an Indexed Job, or of a JobSet with one: JOB_COMPLETION_INDEX and REIGEN_NODES."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    if NODES_VARIABLE not in environ:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX is {environ['JOB_COMPLETION_INDEX']!r}, but {NODES_VARIABLE} is not set: Kubernetes "
            "does not tell a pod how many completions its Job has; set it in the pod's template (env)"
        )
    name = INDEX_VARIABLE if INDEX_VARIABLE in environ else "JOB_COMPLETION_INDEX"
    index, size = read_number(environ, name), read_number(environ, NODES_VARIABLE, 1)
    check_index((name, index), (NODES_VARIABLE, size))
    leader = _derive_leader(environ, _read_pod(read_file), size)
    return _make_job(environ, read_file, "Kubernetes Indexed Job", (name, index), (NODES_VARIABLE, size), leader)


def find_stateful_set(environ: Mapping[str, str], read_file: ReadFile) -> NodeJob | None:
    """Find the pods of a StatefulSet, or of what numbers its host names as it does: REIGEN_NODES, and the host name."""
    if NODES_VARIABLE not in environ:
        return None
    size, pod = read_number(environ, NODES_VARIABLE, 1), _read_pod(read_file)
    if INDEX_VARIABLE in environ:
        name, index = INDEX_VARIABLE, read_number(environ, INDEX_VARIABLE)
    elif pod.ordinal is not None:
        name, index = f"the number in the host name {pod.host}", pod.ordinal
    else:
        raise ConfigError(
            f"{NODES_VARIABLE} is {size}, but nothing says which node this is: there is neither JOB_COMPLETION_INDEX "
            f"nor {INDEX_VARIABLE}, and the host name {pod.host!r} does not end in -NUMBER as a StatefulSet's"
        )
    check_index((name, index), (NODES_VARIABLE, size))
    leader = _derive_leader(environ, pod, size)
    return _make_job(environ, read_file, "StatefulSet", (name, index), (NODES_VARIABLE, size), leader)


def _make_job(
    environ: Mapping[str, str],
    read_file: ReadFile,
    kind: str,
    index: tuple[str, int],
    size: tuple[str, int],
    leader: str,
) -> NodeJob:
    check_index(index, size)
    pod = _read_pod(read_file)
    nodes = f"{size[1]} node{'s' if size[1] > 1 else ''} ({size[0]})"
    return NodeJob(
        f"{kind} of {nodes}, node {index[1]} ({index[0]})",
        index[1],
        size[1],
        leader or pod.host,
        job_id=pod.base,
        secret_file=SECRET_FILE,
        grace_seconds=_parse_grace(environ),
        removed=tuple(name for name in environ if _DESCRIBES_NODE.fullmatch(name)),
    )


def _read_pod(read_file: ReadFile) -> _Pod:
    host = (read_file("/proc/sys/kernel/hostname") or "").strip().partition(".")[0]
    match = _ORDINAL.fullmatch(host)
    domain = _find_domain(host, read_file("/etc/hosts") or "")
    return _Pod(host, match["base"], int(match["ordinal"]), domain) if match else _Pod(host, host, None, domain)


def _find_domain(host: str, hosts_file: str) -> str:
    """Find the domain of this pod's full name in the text of /etc/hosts; empty: it has none."""
    for line in hosts_file.splitlines():
        for name in line.partition("#")[0].split()[1:]:
            own, _, domain = name.partition(".")
            if own == host and domain:
                return domain
    return ""


def _derive_leader(environ: Mapping[str, str], pod: _Pod, size: int) -> str:
    """Derive the name of node 0 from this one's, by the numbers at the ends of pods' host names.

    Raises:
        ConfigError: nothing says it, and there are other nodes.
    """
    if leader := environ.get(LEADER_VARIABLE):
        return leader
    if pod.ordinal is not None and pod.domain:
        return f"{pod.base}-0.{pod.domain}"
    if size == 1:
        return pod.host
    lack = f"the host name {pod.host!r} does not end in -NUMBER" if pod.ordinal is None else "the pod has no subdomain"
    raise ConfigError(
        f"nothing says how to reach node 0: {lack}; give the pods a headless Service (subdomain: SERVICE in their "
        f"template), or set {LEADER_VARIABLE} to the name of node 0"
    )


def _parse_grace(environ: Mapping[str, str]) -> float | None:
    text = environ.get(GRACE_VARIABLE)
    if text is None:
        return _DEFAULT_GRACE_SECONDS if "KUBERNETES_SERVICE_HOST" in environ else None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{GRACE_VARIABLE} is {text!r}, not a number of seconds")
    return seconds


def _parse_pet_nodes(environ: Mapping[str, str]) -> int:
    """Read PET_NNODES, a number or ``least:most``, which must be the same."""
    least, has_most, most = environ.get("PET_NNODES", "").partition(":")
    if has_most and least != most:
        raise ConfigError(
            f"PET_NNODES is {environ['PET_NNODES']!r}: the number of nodes cannot change here; ask for a fixed one"
        )
    return read_number({**environ, "PET_NNODES": least} if has_most else environ, "PET_NNODES", 1)


def _parse_pet_processes(environ: Mapping[str, str]) -> int | None:
    """Read PET_NPROC_PER_NODE: a number, or a word of torchrun's; None where it is not set."""
    text = environ.get("PET_NPROC_PER_NODE", "")
    if not text:
        return None
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    if text not in {"auto", "gpu", "cpu"}:
        raise ConfigError(f"PET_NPROC_PER_NODE is {text!r}, neither a number above 0 nor auto, gpu, cpu")
    if text != "cpu" and (num_gpus := count_gpus(environ)):
        return num_gpus
    if text == "gpu":
        raise ConfigError("PET_NPROC_PER_NODE is 'gpu', but there is no GPU on this node")
    return len(detect_cpus().cpus)
