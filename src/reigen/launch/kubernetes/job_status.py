"""State of a Job on Kubernetes, from what `kubectl get job,pods -o json` returns. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reigen.launch.submission import SubmittedPhase, SubmittedState

_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"

Resource = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of the Job, and of its pods.

    Attributes:
        state: the Job's.
        leader: name of pod 0; empty: there is none.
        leader_has_begun: its container runs, or has ended.
        num_left: pods that have not ended, though the Job is not there any more.
    """

    state: SubmittedState
    leader: str = ""
    leader_has_begun: bool = False
    num_left: int = 0


def read_status(name: str, items: Sequence[Resource]) -> JobStatus:
    """Read the status of a Job from itself and its pods.

    Args:
        name: the Job's.
        items: the resources that have its label.
    """
    job = next((each for each in items if each.get("kind") == "Job"), None)
    pods = sorted((each for each in items if each.get("kind") == "Pod"), key=_age)
    if job is None:
        num_left = sum((pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"} for pod in pods)
        state = SubmittedState(SubmittedPhase.ENDED, "the Job is not there any more: it was deleted")
        return JobStatus(state, num_left=num_left)
    leaders = [pod for pod in pods if _index(pod) == 0]
    leader = leaders[-1] if leaders else None
    leader_name = leader["metadata"]["name"] if leader else ""
    begun = leader is not None and bool({"running", "terminated"} & {*next(_container_states(leader), {})})
    ended = {each.get("type"): each for each in _conditions(job) if each.get("status") == "True"}
    if "Complete" in ended:
        state = SubmittedState(SubmittedPhase.ENDED, "", 0)
    elif "Failed" in ended:
        state = _explain_failure(ended["Failed"], pods)
    elif begun:
        state = SubmittedState(SubmittedPhase.RUNNING)
    else:
        state = SubmittedState(SubmittedPhase.WAITING, _explain_waiting(job, pods))
    return JobStatus(state, leader_name, begun)


def explain_events(events: Sequence[Resource]) -> str:
    """Return the last warning among a Job's events: why it has no pods (a quota, a policy); empty if there is none."""
    warnings = [each for each in events if each.get("type") == "Warning"]
    return f"{warnings[-1].get('reason')}: {warnings[-1].get('message')}" if warnings else ""


def _explain_failure(condition: Resource, pods: Sequence[Resource]) -> SubmittedState:
    """Return the exit code of the pod that failed: of pod 0, which ends with the job's, where it has one."""
    failed = [(pod, *_failure(pod)) for pod in pods if _failure(pod)[0]]
    if not failed:
        words = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
        return SubmittedState(SubmittedPhase.ENDED, f"the Job has failed: {words or 'it is not said why'}")
    pod, code, reason = next((each for each in failed if _index(each[0]) == 0), failed[0])
    where = f"pod {pod['metadata']['name']}: " if reason or _index(pod) != 0 else ""
    text = f"{where}{reason or f'exit code {code}'}" if where else ""
    return SubmittedState(SubmittedPhase.ENDED, text, code)


def _failure(pod: Resource) -> tuple[int, str]:
    """Return the exit code of a pod, 0 if it has not failed, and Kubernetes' reason, if that is not the code alone."""
    status = pod.get("status") or {}
    for state in _container_states(pod):
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            reason = ended.get("reason", "")
            return ended["exitCode"], "" if reason == "Error" else f"{reason} {ended.get('message', '')}".strip()
    if status.get("phase") == "Failed":  # evicted, or its node is lost: no container says anything
        return 1, ": ".join(filter(None, (status.get("reason"), status.get("message")))) or "it has failed"
    return 0, ""


def _explain_waiting(job: Resource, pods: Sequence[Resource]) -> str:
    if (job.get("spec") or {}).get("suspend"):
        return "the Job is suspended: a queue holds it, or a user has suspended it"
    for pod in pods:
        name = pod["metadata"]["name"]
        for condition in _conditions(pod):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return f"pod {name}: {condition.get('reason')}: {condition.get('message')}"
        for state in _container_states(pod):
            waiting = state.get("waiting")
            if waiting and waiting.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
                return f"pod {name}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return f"{len(pods)} of {(job.get('spec') or {}).get('completions')} pods are there"


def _container_states(pod: Resource) -> Iterator[Resource]:
    """Yield the states of a pod's containers, the first of its spec first: that is the job's."""
    first = next(iter((pod.get("spec") or {}).get("containers") or [{}])).get("name")
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    for status in sorted(statuses, key=lambda each: each.get("name") != first):
        yield status.get("state") or {}


def _conditions(resource: Resource) -> Sequence[Resource]:
    return (resource.get("status") or {}).get("conditions") or []


def _index(pod: Resource) -> int | None:
    text = (pod["metadata"].get("annotations") or {}).get(_INDEX_ANNOTATION, "")
    return int(text) if text.isdigit() else None


def _age(pod: Resource) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))
