"""Manifests of a job on Kubernetes: an Indexed Job, a headless Service, a NetworkPolicy, a Secret. Pure.

All pods of the Job run `reigen launch --launcher nodes`. The Service gives them names; the NetworkPolicy lets no others
connect to them; and each mounts the Secret as a file that only its owner may read. No variable and no argument has the
secret: whoever may see a pod's description sees those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import ConfigError
from reigen.launch.job_options import name_of_command, parse_memory
from reigen.launch.nodes.kubernetes import GRACE_VARIABLE, NODES_VARIABLE, SECRET_FILE

Manifest = dict[str, Any]

#: Label of everything that belongs to a job, and its value is the job's name.
JOB_LABEL = "reigen-job"
#: Label by which Kueue finds the queue of a job.
_KUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_SECRET_FILE_VARIABLE = "REIGEN_SECRET_FILE"
_START_TIMEOUT_VARIABLE = "REIGEN_START_TIMEOUT"
#: Pods come when their images are there, and the nodes: that takes longer than a login.
_START_TIMEOUT_SECONDS = 600
_DEFAULT_GRACE_SECONDS = 30
#: A finished Job that nobody has removed is kept for a day.
_KEPT_SECONDS = 86400
#: Longest name of a Job: its pods' host names have ``-INDEX`` behind it, and are labels of DNS.
_LONGEST_NAME = 63 - 5
_SHM_GIB_PER_PROCESS = 1
_GPU_RESOURCE = "nvidia.com/gpu"
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
#: Variables that the manifests set.
_OWN_VARIABLES = (NODES_VARIABLE, GRACE_VARIABLE, _SECRET_FILE_VARIABLE)
_SECRET_VOLUME, _SHM_VOLUME = "reigen-secret", "reigen-shm"


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """Resources of each worker, or server: processors, memory (``4g``) and GPUs; None: not asked for."""

    cores: int | None = None
    memory: str | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """Job that manifests are made of.

    Attributes:
        name: the Job's, and the Service's.
        image: of its containers; None: the template's.
        command: program and arguments that every pod runs.
        num_workers, num_servers, num_pods: processes, and the pods that they are spread over.
        workers, servers: resources of each process.
        namespace: of everything, whatever the template says; None: kubectl's.
        queue: Kueue's queue; None: the Job is not Kueue's.
        environ: variables of the containers.
        template: a Job, a Pod, a PodTemplate or a pod's spec, to begin with; empty: nothing.

    Raises:
        ConfigError: a name cannot be one, there is no image, or numbers make no sense.
    """

    name: str
    image: str | None
    command: tuple[str, ...]
    num_workers: int
    num_pods: int
    num_servers: int = 0
    workers: ProcessResources = ProcessResources()
    servers: ProcessResources = ProcessResources()
    namespace: str | None = None
    queue: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.namespace is not None and (not _NAMESPACE.fullmatch(self.namespace) or len(self.namespace) > 63):
            raise ConfigError(f"--kube-namespace {self.namespace}: {_label_rule('a letter or digit', 63)}")
        if not 1 <= self.num_pods <= self.num_workers:
            raise ConfigError(f"--pods {self.num_pods}: must be from 1 to the number of workers, {self.num_workers}")
        for option, numbers in (("worker", self.workers), ("server", self.servers)):
            if numbers.cores is not None and numbers.cores < 1:
                raise ConfigError(f"--{option}-cores {numbers.cores}: must be at least 1")
            if numbers.gpus is not None and numbers.gpus < 0:
                raise ConfigError(f"--gpus {numbers.gpus}: must not be negative")
        if clash := sorted({*_OWN_VARIABLES, "REIGEN_SECRET"} & {*self.environ}):
            raise ConfigError(f"--env {clash[0]}: the manifests set it, or must not have it")

    @property
    def secret_name(self) -> str:
        """Name of the Secret."""
        return f"{self.name}-reigen"

    @property
    def workers_per_pod(self) -> int:
        """Most workers of a pod."""
        return -(-self.num_workers // self.num_pods)

    @property
    def servers_per_pod(self) -> int:
        """Most servers of a pod."""
        return -(-self.num_servers // self.num_pods)


def check_name(name: str) -> None:
    """Raise ConfigError where a Job, and the Service and pods of that name, cannot be called so."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ConfigError(f"--jobname {name}: {_label_rule('a letter', _LONGEST_NAME)}")


def make_name(command: Sequence[str], token: str) -> str:
    """Make a name of the command and a token of lower-case letters and digits."""
    stem = re.sub(r"[^a-z0-9]+", "-", name_of_command(command).partition(".")[0].lower()).strip("-")
    return f"reigen-{stem[:40].strip('-')}-{token}" if stem else f"reigen-{token}"


def make_manifests(job: KubernetesJob, owner_uid: str | None = None) -> list[Manifest]:
    """Make the Service and the NetworkPolicy of a Job's pods.

    ``owner_uid`` is the Job's: they are removed with it.
    """
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name, owner_uid),
        # addresses of pods that are not ready, too: they become ready by finding each other
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: job.name}},
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name, owner_uid),
        "spec": {
            "podSelector": {"matchLabels": {JOB_LABEL: job.name}},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {JOB_LABEL: job.name}}}]}],
        },
    }
    return [service, policy]


def make_secret(job: KubernetesJob, secret: str, owner_uid: str | None = None) -> Manifest:
    """Make the Secret: for kubectl's stdin, and for nothing else."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.secret_name, owner_uid),
        "immutable": True,
        "stringData": {"secret": secret},
    }


def make_job(job: KubernetesJob, *, suspend: bool = False) -> Manifest:
    """Make the Job; ``suspend``: its pods do not start yet.

    Raises:
        ConfigError: the template contradicts what a job needs.
    """
    metadata, spec, template = _split_template(job.template)
    _check_template(spec, job.num_pods)
    spec = {
        **spec,
        "completionMode": "Indexed",
        "completions": job.num_pods,
        "parallelism": job.num_pods,
        "backoffLimit": 0,  # a job whose number of processes is fixed cannot go on without one of them
        "template": _make_pod(job, template),
    }
    spec.setdefault("ttlSecondsAfterFinished", _KEPT_SECONDS)
    own = _metadata(job, job.name, None)
    labels = {**metadata.get("labels", {}), **own["labels"]}
    if job.queue is not None:
        labels[_KUEUE_LABEL] = job.queue
    if suspend:
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**metadata, **own, "labels": labels}, "spec": spec}


def escape_word(text: str) -> str:
    """Escape a word of a command line, or a variable's value, in which Kubernetes would replace ``$(NAME)``."""
    return text.replace("$", "$$")


def _label_rule(first: str, longest: int) -> str:
    return f"must begin with {first}, have only a-z, 0-9 and -, not end in -, and {longest} characters at most"


def _metadata(job: KubernetesJob, name: str, owner_uid: str | None) -> Manifest:
    found: Manifest = {"name": name, "labels": {JOB_LABEL: job.name, "app.kubernetes.io/managed-by": "reigen"}}
    if job.namespace is not None:
        found["namespace"] = job.namespace
    if owner_uid is not None:
        found["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": job.name, "uid": owner_uid}]
    return found


def _split_template(template: Mapping[str, Any]) -> tuple[Manifest, Manifest, Manifest]:
    """Return a template's metadata and spec of the Job, and its pod template: whichever of them it has.

    Raises:
        ConfigError: it is of another kind.
    """
    found = deepcopy(dict(template))
    kind = found.get("kind", "" if "containers" in found or not found else "of no kind, without containers")
    if kind == "":
        return {}, {}, {"spec": found}
    metadata, spec = found.get("metadata") or {}, found.get("spec") or {}
    if kind == "Job":
        return metadata, spec, spec.pop("template", None) or {}
    if kind in {"Pod", "PodTemplate"}:
        pod = found.get("template") or {} if kind == "PodTemplate" else {"metadata": metadata, "spec": spec}
        pod.get("metadata", {}).pop("name", None)
        return {}, {}, pod
    raise ConfigError(f"--kube-worker-template: a Job, Pod, PodTemplate or a pod's spec is needed; this is {kind}")


def find_namespace(template: Mapping[str, Any]) -> str | None:
    """Find the namespace that a template names, for itself or for its pods; None: it names none.

    Raises:
        ConfigError: the template is of another kind.
    """
    pod = _split_template(template)[2]
    found = (each.get("metadata") or {} for each in (template, pod))
    return next((str(each["namespace"]) for each in found if each.get("namespace")), None)


def _check_template(spec: Mapping[str, Any], num_pods: int) -> None:
    """Raise ConfigError where the template of a Job says something else than the options."""
    wanted = {"completions": num_pods, "parallelism": num_pods, "backoffLimit": 0, "completionMode": "Indexed"}
    for name, value in wanted.items():
        if spec.get(name, value) != value:
            raise ConfigError(f"--kube-worker-template: {name} must be {value}, not {spec[name]}; leave it out")


def _make_pod(job: KubernetesJob, template: Manifest) -> Manifest:
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    if spec.get("restartPolicy", "Never") != "Never":
        raise ConfigError("--kube-worker-template: restartPolicy must be Never: a rank cannot come back alone")
    labels = {**(metadata.get("labels") or {}), JOB_LABEL: job.name}
    spec["restartPolicy"] = "Never"
    spec["subdomain"] = job.name
    spec.setdefault("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)  # no process of the job needs the API
    if "affinity" not in spec and "topologySpreadConstraints" not in spec:
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        spec["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": {JOB_LABEL: job.name}}}]
    containers = spec.get("containers") or [{"name": "reigen"}]
    own = _make_container(job, containers[0], spec["terminationGracePeriodSeconds"])
    spec["containers"] = [own, *containers[1:]]
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(job, own)]
    kept = {name: value for name, value in metadata.items() if name != "namespace"}  # it is the Job's
    return {"metadata": {**kept, "labels": labels}, "spec": spec}


def _make_container(job: KubernetesJob, template: Manifest, grace_seconds: int) -> Manifest:
    image = job.image or template.get("image")
    if not image:
        raise ConfigError("--launcher kubernetes needs --kube-worker-image IMAGE, or a template with one")
    named = [str(each.get("name")) for each in template.get("env") or []]
    if clash := sorted({*_OWN_VARIABLES, "REIGEN_SECRET"} & {*named}):
        raise ConfigError(f"--kube-worker-template: {clash[0]} is set by the manifests, or must not be there")
    variables = {_START_TIMEOUT_VARIABLE: str(_START_TIMEOUT_SECONDS)} | dict(job.environ)
    variables = {
        name: escape_word(text) for name, text in variables.items() if name not in named or name in job.environ
    }
    variables |= {
        NODES_VARIABLE: str(job.num_pods),
        GRACE_VARIABLE: str(grace_seconds),
        _SECRET_FILE_VARIABLE: SECRET_FILE,
    }
    kept = [each for each in template.get("env") or [] if each.get("name") not in variables]
    mounts = [
        {"name": _SECRET_VOLUME, "mountPath": SECRET_FILE.rpartition("/")[0], "readOnly": True},
    ]
    has_shm = any(each.get("mountPath") == "/dev/shm" for each in template.get("volumeMounts") or [])
    if not has_shm:
        mounts.append({"name": _SHM_VOLUME, "mountPath": "/dev/shm"})
    return {
        **template,
        "image": image,
        "command": [escape_word(job.command[0])],
        "args": [escape_word(word) for word in job.command[1:]],
        "env": [*kept, *({"name": name, "value": text} for name, text in variables.items())],
        "volumeMounts": [*(template.get("volumeMounts") or []), *mounts],
        "resources": _merge_resources(template.get("resources") or {}, _resources(job)),
    }


def _volumes(job: KubernetesJob, container: Manifest) -> list[Manifest]:
    # 0400 belongs to the container's root; a pod with another user needs securityContext.fsGroup
    found: list[Manifest] = [{"name": _SECRET_VOLUME, "secret": {"secretName": job.secret_name, "defaultMode": 0o400}}]
    if any(each["name"] == _SHM_VOLUME for each in container["volumeMounts"]):
        gib = _SHM_GIB_PER_PROCESS * (job.workers_per_pod + job.servers_per_pod)
        found.append({"name": _SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}})
    return found


def _resources(job: KubernetesJob) -> Manifest:
    """Sum the resources of a pod's processes. Memory and GPUs are limits, too; processors are none."""
    parts = (("worker", job.workers, job.workers_per_pod), ("server", job.servers, job.servers_per_pod))
    cores = sum((each.cores or 0) * count for _, each, count in parts)
    memory = sum(parse_memory(f"--{role}-memory", each.memory) * count for role, each, count in parts if each.memory)
    gpus = sum((each.gpus or 0) * count for _, each, count in parts)
    requests: Manifest = {"cpu": str(cores)} if cores else {}
    limits: Manifest = {}
    if memory:
        limits["memory"] = requests["memory"] = f"{-(-memory >> 20)}Mi"
    if gpus:
        limits[_GPU_RESOURCE] = str(gpus)
    return {name: each for name, each in (("requests", requests), ("limits", limits)) if each}


def _merge_resources(template: Mapping[str, Any], own: Mapping[str, Any]) -> Manifest:
    names = [name for name in ("requests", "limits") if template.get(name) or own.get(name)]
    merged = {name: {**(template.get(name) or {}), **own.get(name, {})} for name in names}
    return {**template, **merged}
