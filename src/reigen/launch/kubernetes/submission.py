"""Submission of a job to Kubernetes by kubectl: `reigen launch --launcher kubernetes`.

a. The Job is created suspended. What belongs to it, the Secret too, is created with the Job as its owner, and goes with
   it, however that is deleted. Manifests go through kubectl's stdin: the secret is in no argument, and in no file.
b. The Job is resumed, or left to Kueue where it has a queue.
c. The log of pod 0, which has all ranks' output, is followed; the Job's state and its pods' are asked for.
d. In the end the Job is deleted.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reigen.errors import ConfigError, LaunchError
from reigen.launch.kubernetes.job_status import JobStatus, explain_events, read_status
from reigen.launch.kubernetes.manifest import (
    JOB_LABEL,
    KubernetesJob,
    Manifest,
    ProcessResources,
    make_job,
    make_manifests,
    make_name,
    make_secret,
)
from reigen.launch.kubernetes.pod_log import PodLog
from reigen.launch.kubernetes.yaml_files import dump_manifests, read_template
from reigen.launch.submission import SubmissionRequest, SubmittedPhase, SubmittedState, run_client

_SECRET_BYTES = 32
#: Seconds that the rest of the log may take to come when the job has ended.
_LAST_LOG_SECONDS = 10.0
#: The manifests are as for any user of the cluster, but these words of kubectl's explain themselves with one more.
_ADVICE = (
    ("namespaces", "not found", "create the namespace, or name another: --kube-namespace"),
    ("already exists", "", "another job has this name: --jobname"),
    ("forbidden", "", "ask for the rights to create and delete jobs, services, networkpolicies and secrets there"),
    ("connection refused", "", "is kubectl configured for a cluster? kubectl cluster-info"),
)


def make_kubernetes_job(request: SubmissionRequest, token: str) -> KubernetesJob:
    """Make the job of what the user wants; ``token`` ends a name that the user does not give.

    Raises:
        ConfigError: something of it cannot be.
    """
    options = request.options
    if options.kube_server_template is not None:
        raise ConfigError("--kube-server-template: servers run in the workers' pods, whose is --kube-worker-template")
    image = options.kube_worker_image or options.kube_server_image
    if options.kube_server_image not in {None, image}:
        other = options.kube_server_image
        raise ConfigError(f"--kube-server-image {other}: servers run in the workers' pods, whose image is {image}")
    words = [*request.arguments, "--launcher", "nodes", "--", *request.command]
    return KubernetesJob(
        options.job_name or make_name(request.command, token),
        image,
        ("reigen", "launch", *words),
        request.num_workers,
        options.pods or request.num_workers,
        request.num_servers,
        ProcessResources(options.worker_cores, options.worker_memory, options.gpus),
        ProcessResources(options.server_cores, options.server_memory),
        options.kube_namespace,
        options.queue,
        {name: request.environ[name] for name in request.exports},
        {} if options.kube_worker_template is None else read_template(options.kube_worker_template),
    )


class KubernetesSubmission:
    """Job for Kubernetes; a ``Submission``.

    Raises:
        ConfigError: it cannot be made.
    """

    def __init__(self, request: SubmissionRequest) -> None:
        self._job = make_kubernetes_job(request, secrets.token_hex(3))
        self._manifest = make_job(self._job)  # what is wrong with it is said before anything is created
        namespace = [] if self._job.namespace is None else [f"--namespace={self._job.namespace}"]
        self._kubectl = ["kubectl", *namespace]
        self._is_created = self._is_deleted = False
        self._log: PodLog | None = None
        self._ended_at: float | None = None

    @property
    def preview(self) -> str:
        """Text of the manifests, without the Secret, and the command that makes one."""
        job, kubectl = self._job, " ".join(self._kubectl)
        make = f"openssl rand -hex 32 | {kubectl} create secret generic {job.secret_name} --from-file=secret=/dev/stdin"
        lines = [
            "# The Secret is not shown. Make one first; with the last command everything is removed:",
            f"#   {make}",
            f"#   {kubectl} delete job/{job.name} service/{job.name} networkpolicy/{job.name} secret/{job.secret_name}",
        ]
        return "\n".join(lines) + "\n" + dump_manifests([*make_manifests(job), self._manifest]).rstrip("\n")

    @property
    def cancel_command(self) -> str:
        """Command that deletes the Job, and what belongs to it."""
        return " ".join([*self._kubectl, "delete", "job", self._job.name])

    def submit(self) -> str:
        """Create everything, the Job first."""
        job = self._job
        uid = self._create([make_job(job, suspend=True)], ["--output=jsonpath={.metadata.uid}"])
        self._is_created = True
        secret = make_secret(job, secrets.token_hex(_SECRET_BYTES), uid.strip())
        self._create([*make_manifests(job, uid.strip()), secret], [])
        if job.queue is None:
            self._run(["patch", "job", job.name, "--type=merge", "--patch", '{"spec":{"suspend":false}}'])
        return f"Kubernetes job {job.name}"

    def poll(self) -> SubmittedState:
        """Ask for the Job and its pods; the end counts when the log has ended, too."""
        status = self._get_status()
        if status.leader_has_begun and self._log is None:
            container = self._manifest["spec"]["template"]["spec"]["containers"][0]["name"]
            self._log = PodLog(self._kubectl, status.leader, container)
            self._log.follow()
        if status.state.phase is not SubmittedPhase.ENDED:
            if self._log is not None and self._log.has_ended:
                self._log.follow()  # the connection was lost
            return status.state
        now = time.monotonic()
        self._ended_at = now if self._ended_at is None else self._ended_at
        log_is_open = self._log is not None and not self._log.has_ended
        if log_is_open and now - self._ended_at < _LAST_LOG_SECONDS and not self._is_deleted:
            return SubmittedState(SubmittedPhase.RUNNING)
        return status.state

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        """Return what pod 0 has printed: Kubernetes keeps stdout and stderr in one log."""
        data = b"" if self._log is None else self._log.read()
        return [(1, data)] if data else []

    def cancel(self) -> None:
        """Delete the Job; its pods get SIGTERM, and are killed after their grace."""
        self._delete()

    def close(self) -> Sequence[str]:
        """Delete the Job, and with it what belongs to it."""
        if self._log is not None:
            self._log.close()
        if not self._is_created or self._is_deleted:
            return ()
        try:
            self._delete()
        except LaunchError as error:
            return [f"{error}; to remove it: {self.cancel_command}"]
        return ()

    def _get_status(self) -> JobStatus:
        selector = f"--selector={JOB_LABEL}={self._job.name}"
        items = json.loads(self._run(["get", "job,pods", selector, "--output=json"]))["items"]
        status = read_status(self._job.name, items)
        if status.state.phase is SubmittedPhase.WAITING and len(items) == 1:
            return self._with_events(status)
        return status

    def _with_events(self, status: JobStatus) -> JobStatus:
        """Add why a Job has no pods, if that is to be had."""
        fields = f"--field-selector=involvedObject.kind=Job,involvedObject.name={self._job.name}"
        try:
            items: list[Mapping[str, Any]] = json.loads(self._run(["get", "events", fields, "--output=json"]))["items"]
        except LaunchError:  # not everybody may see events
            return status
        reason = explain_events(items)
        return JobStatus(SubmittedState(SubmittedPhase.WAITING, reason)) if reason else status

    def _create(self, manifests: Sequence[Manifest], arguments: Sequence[str]) -> str:
        document = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        text = json.dumps(manifests[0] if len(manifests) == 1 else document)
        return self._run(["create", "--filename=-", *arguments], input_text=text)

    def _delete(self) -> None:
        # in the background: whoever waits for the pods' end sees it by their state
        self._run(["delete", "job", self._job.name, "--ignore-not-found", "--cascade=background", "--wait=false"])
        self._is_deleted = True

    def _run(self, arguments: Sequence[str], input_text: str | None = None) -> str:
        done = run_client([*self._kubectl, *arguments], input_text=input_text)
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        advice = next((advice for one, other, advice in _ADVICE if one in said.lower() and other in said.lower()), "")
        raise LaunchError(f"kubectl {arguments[0]}: {said}{f' ({advice})' if advice else ''}")
