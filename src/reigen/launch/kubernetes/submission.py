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
    find_namespace,
    make_job,
    make_manifests,
    make_name,
    make_secret,
)
from reigen.launch.kubernetes.pod_log import PodLog
from reigen.launch.kubernetes.yaml_files import dump_manifests, read_template
from reigen.launch.options import complain
from reigen.launch.submission import (
    NoAnswerError,
    SubmissionRequest,
    SubmittedPhase,
    SubmittedState,
    run_client,
)

_SECRET_BYTES = 32
#: Label of a Job, and its value is this submission's alone: whoever has the same name is not deleted.
_SUBMISSION_LABEL = "reigen-submission"
#: Seconds without more of the log, while the job has ended, after which the rest is not waited for.
_LAST_LOG_SECONDS = 10.0
#: Words of kubectl's by which nothing was created; with any other error, a broken connection's, the Job may be there.
_REFUSALS = (
    "already exists",
    "forbidden",
    "not found",
    "invalid",
    "connection refused",
    "unauthorized",
    "no such host",
)
#: The manifests are as for any user of the cluster, but these words of kubectl's explain themselves with one more.
_ADVICE = (
    ("namespaces", "not found", "create the namespace, or name another: --kube-namespace"),
    ("already exists", "", "another job has this name: --jobname"),
    ("forbidden", "", "ask for the rights to create and delete jobs, services, networkpolicies and secrets there"),
    ("connection refused", "", "is kubectl configured for a cluster? kubectl cluster-info"),
)


def make_kubernetes_job(request: SubmissionRequest, token: str) -> KubernetesJob:
    """Make the job of a request; ``token`` ends a name that the user does not give.

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
    template = {} if options.kube_worker_template is None else read_template(options.kube_worker_template)
    return KubernetesJob(
        options.job_name or make_name(request.command, token),
        image,
        ("reigen", "launch", *words),
        request.num_workers,
        options.pods or request.num_workers,
        request.num_servers,
        ProcessResources(options.worker_cores, options.worker_memory, options.gpus),
        ProcessResources(options.server_cores, options.server_memory),
        options.kube_namespace or find_namespace(template),
        options.queue,
        {name: request.environ[name] for name in request.exports},
        template,
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
        self._token = secrets.token_hex(8)
        self._is_created = self._is_deleted = False
        self._log: PodLog | None = None
        self._reported = ""
        #: When the Job had ended, or some of the log has come after that; the log is over then.
        self._ended_at: float | None = None
        self._is_over = False

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
        manifest = make_job(job, suspend=True)
        manifest["metadata"]["labels"][_SUBMISSION_LABEL] = self._token
        self._is_created = True  # it may be, also where no answer comes, or a signal
        try:
            uid = self._create([manifest], ["--output=jsonpath={.metadata.uid}"])
        except LaunchError as error:
            self._is_created = isinstance(error, NoAnswerError) or not _is_refusal(str(error))
            raise
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
        if self._is_deleted:
            self._is_over = status.state.phase is SubmittedPhase.ENDED and not status.num_left
            return status.state if self._is_over else SubmittedState(SubmittedPhase.RUNNING)
        if status.state.phase is SubmittedPhase.ENDED:
            return self._await_log(status)
        if self._log is not None and self._log.has_ended:
            self._log.follow()  # the connection was lost
        return status.state

    def _await_log(self, status: JobStatus) -> SubmittedState:
        """Return the Job's state, which has ended, when its log has, too."""
        now = time.monotonic()
        if self._ended_at is None:
            self._ended_at = now
            if self._log is not None and self._log.has_ended and status.leader:
                self._log.follow()  # perhaps it was the connection that has ended, and not the log
        if self._log is not None and not self._log.has_ended and now - self._ended_at < _LAST_LOG_SECONDS:
            return SubmittedState(SubmittedPhase.RUNNING)
        self._is_over = True
        return status.state

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        """Return what pod 0 has printed: Kubernetes keeps stdout and stderr in one log."""
        if self._log is None:
            return []
        data = self._log.read()
        if data and self._ended_at is not None:
            self._ended_at = time.monotonic()
        if self._log.error not in {"", self._reported} and not self._is_deleted:
            self._reported = self._log.error
            complain(f"kubectl logs: {self._reported}" + ("" if self._is_over else "; it is tried again"))
        if not data and self._is_over:
            data = self._log.finish()
        return [(1, data)] if data else []

    def cancel(self) -> float:
        """Delete the Job; its pods get SIGTERM, and are killed after their grace, which is returned."""
        self._delete()
        return float(self._manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])

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
        chosen = f"--selector={_SUBMISSION_LABEL}={self._token}"
        self._run(["delete", "job", chosen, "--ignore-not-found", "--cascade=background", "--wait=false"])
        self._is_deleted = True

    def _run(self, arguments: Sequence[str], input_text: str | None = None) -> str:
        done = run_client([*self._kubectl, *arguments], input_text=input_text)
        if done.returncode == 0:
            return done.stdout
        text = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        advice = next((advice for one, other, advice in _ADVICE if one in text.lower() and other in text.lower()), "")
        raise LaunchError(f"kubectl {arguments[0]}: {text}{f' ({advice})' if advice else ''}")


def _is_refusal(text: str) -> bool:
    """Return whether an error of kubectl's says for sure that nothing was created."""
    return any(words in text.lower() for words in _REFUSALS)
