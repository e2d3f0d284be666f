"""`reigen launch --launcher kubernetes` with a stand-in for kubectl: what it is given, and what its answers come to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from reigen.cli.launch import main
from reigen.launch import submission
from reigen.launch.kubernetes import pod_log
from reigen.launch.kubernetes import submission as kubernetes_submission
from reigen.launch.kubernetes.job_status import explain_events, read_status
from reigen.launch.kubernetes.pod_log import LineStamps, PodLog
from reigen.launch.kubernetes.submission import KubernetesSubmission
from reigen.launch.submission import SubmittedPhase
from tests.network.waiting import wait_for
from tests.unit.launch.schemas import check_schema

STAND_IN = Path(__file__).with_name("stand_in_kubectl.py")
ARGUMENTS = ["--launcher", "kubernetes", "-n", "4", "-s", "1", "--pods", "2", "--jobname", "train"]
IMAGE = ["--kube-worker-image", "registry/image:1"]


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.directory / name.replace("_", ".")).write_text(text)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The calls so far; of one that is being written down, nothing yet."""
        lines = (self.directory / "asked").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def verbs(self) -> list[str]:
        return [next(word for word in each["argv"] if word[:2] != "--") for each in self.asked]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    directory = tmp_path / "cluster"
    directory.mkdir()
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STAND_IN} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_CLUSTER", str(directory))
    for name in ("_POLL_SECONDS", "_OUTPUT_SECONDS"):
        monkeypatch.setattr(submission, name, 0.02)
    return Cluster(directory)


def launch(*arguments: str) -> int:
    return main([*ARGUMENTS, *IMAGE, *arguments, "python", "train.py", "$(X)"])


def test_what_is_printed_is_what_kubernetes_takes(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--kube-namespace", "space", "--print") == 0
    text = capsys.readouterr().out
    manifests = list(yaml.safe_load_all(text))
    for each in manifests:
        check_schema(each)
    assert [each["kind"] for each in manifests] == ["Service", "NetworkPolicy", "Job"]
    assert {each["metadata"]["namespace"] for each in manifests} == {"space"}
    assert "kubectl --namespace=space create secret generic train-reigen --from-file=secret=/dev/stdin" in text
    assert not re.search(r"[0-9a-f]{64}", text)
    assert not (cluster.directory / "asked").exists(), "nothing is asked of the cluster"
    container = manifests[-1]["spec"]["template"]["spec"]["containers"][0]
    words = [container["command"][0], *container["args"]]
    assert words[:2] == ["reigen", "launch"]
    assert "--print" not in words
    assert words[-6:] == ["--launcher", "nodes", "--", "python", "train.py", "$$(X)"]


@pytest.mark.parametrize(
    ("template", "arguments", "namespace"),
    [
        ("{kind: Job, metadata: {namespace: space}}", [], "space"),
        ("{kind: Job, spec: {template: {metadata: {namespace: space}}}}", [], "space"),
        ("{kind: Pod, metadata: {namespace: space, labels: {a: b}}}", [], "space"),
        ("{kind: PodTemplate, metadata: {namespace: space}}", [], "space"),
        ("{kind: Pod, metadata: {namespace: other}}", ["--kube-namespace", "space"], "space"),
        ("{containers: [{name: main}]}", [], None),
    ],
)
def test_the_namespace_of_a_template_is_that_of_everything(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], template: str, arguments: list[str], namespace: str | None
) -> None:
    cluster.write(template_yaml=template)
    assert launch("--kube-worker-template", str(cluster.directory / "template.yaml"), "--print", *arguments) == 0
    text = capsys.readouterr().out
    assert text.count(f"kubectl --namespace={namespace} ") == text.count("kubectl ") * bool(namespace)
    *others, made = yaml.safe_load_all(text)
    for each in (*others, made):
        assert each["metadata"].get("namespace") == namespace
    assert "namespace" not in made["spec"]["template"]["metadata"]


def test_a_job_from_beginning_to_end(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.write(logs_0="2026-01-01T00:00:01.5Z [0] one\n2026-01-01T00:00:02Z [1] two words\n")
    assert launch("--env", "STAND_IN_CLUSTER") == 0
    out, err = capfd.readouterr()
    assert out == "[0] one\n[1] two words\n"
    assert "Kubernetes job train is submitted" in err
    assert cluster.verbs[:3] == ["create", "create", "patch"]
    assert cluster.verbs[-1] == "delete"
    first, second, _, *_ = cluster.asked
    job, belongings = json.loads(first["stdin"]), json.loads(second["stdin"])["items"]
    assert (job["kind"], job["spec"]["suspend"]) == ("Job", True)
    assert [each["kind"] for each in belongings] == ["Service", "NetworkPolicy", "Secret"]
    for each in [job, *belongings]:
        check_schema(each)
    assert {each["metadata"]["ownerReferences"][0]["uid"] for each in belongings} == {"uid-1"}
    environ = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "STAND_IN_CLUSTER", "value": str(cluster.directory)} in environ


def test_the_secret_goes_through_stdin_alone(cluster: Cluster) -> None:
    assert launch() == 0
    texts = [json.loads(each["stdin"]) for each in cluster.asked if each["stdin"]]
    (secret,) = [
        item["stringData"]["secret"] for text in texts for item in text.get("items", []) if "stringData" in item
    ]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    for call in cluster.asked:
        assert secret not in json.dumps([call["argv"], call["environ"]])
        if json.loads(call["stdin"] or "{}").get("kind") == "Job":
            assert secret not in call["stdin"]
    assert launch() == 0
    assert sum(secret in call["stdin"] for call in cluster.asked) == 1, "each job has its own"


def test_a_log_that_breaks_off_is_followed_anew(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    one, two, three, last = (f"2026-01-01T00:00:0{number}.25Z line {number}\n" for number in (1, 2, 3, 4))
    cluster.write(logs_0=one + two + three[:-3], logs_1=two + three[:13], logs_2=two + three, logs_3=three + last[:-1])
    cluster.write(ends="done 7")
    assert launch() == 7
    assert capfd.readouterr().out == "line 1\nline 2\nline 3\nline 4", "each once, and the last one as it is"
    found = [word for call in cluster.asked for word in call["argv"] if word.startswith("--since-time")]
    assert found[:3] == [f"--since-time=2026-01-01T00:00:0{number}.25Z" for number in (2, 2, 3)]


def test_a_log_that_breaks_off_just_before_the_end_is_read_once_more(cluster: Cluster) -> None:
    one, two = (f"2026-01-01T00:00:0{number}.25Z line {number}\n" for number in (1, 2))
    cluster.write(logs_0=one + two[:-4], logs_1=one + two, logs_2="")
    request = submission.SubmissionRequest(
        (), ("true",), 1, 0, submission.SubmissionOptions(kube_worker_image="i", job_name="train")
    )
    with contextlib.closing(KubernetesSubmission(request)) as found:
        found.submit()
        found.poll()
        out = bytearray()

        def read() -> None:
            out.extend(b"".join(piece for _, piece in found.read_output()))

        def connection_has_ended() -> bool:
            read()
            return found._log.has_ended

        def job_has_ended() -> bool:
            phase = found.poll().phase
            read()
            return phase is SubmittedPhase.ENDED

        wait_for(connection_has_ended, "the connection has ended")
        cluster.write(phase="done 0")
        wait_for(job_has_ended, "the job has ended")
    assert out.decode() == "line 1\nline 2\n"


def test_a_log_that_cannot_be_had_says_so_once(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.write(refuse_logs="Error from server (Forbidden): pods/log is forbidden", ends="done 3")
    assert launch() == 3
    assert cluster.verbs.count("logs") >= 3
    assert capfd.readouterr().err.count("kubectl logs: Error from server (Forbidden): pods/log is forbidden") == 1


def test_a_poll_takes_so_much_of_a_log_at_most(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pod_log, "_TURN_BYTES", 100)
    monkeypatch.setattr(pod_log, "_CHUNK_BYTES", 80)
    lines = [f"2026-01-01T00:00:01.25Z line {number}\n" for number in range(50)]
    cluster.write(logs_0="".join(lines))
    sizes: list[int] = []
    read = PodLog.read

    def read_some(log: PodLog) -> bytes:
        found = read(log)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(PodLog, "read", read_some)
    assert launch() == 0
    assert capfd.readouterr().out == "".join(line.partition(" ")[2] for line in lines)
    assert 0 < max(sizes) <= 160


@pytest.mark.parametrize(
    ("verb", "words", "said"),
    [
        ("create", 'Error from server (NotFound): namespaces "nowhere" not found', "create the namespace"),
        ("create", 'Error from server (AlreadyExists): jobs.batch "train" already exists', "--jobname"),
        ("create", "Error from server (Forbidden): jobs.batch is forbidden: User x cannot create", "rights"),
        ("create", "The connection to the server 127.0.0.1:8080 was refused - connection refused", "cluster-info"),
        ("patch", "error: something odd", "kubectl patch: error: something odd"),
    ],
)
def test_refusals_in_the_words_of_kubectl(
    cluster: Cluster, capfd: pytest.CaptureFixture[str], verb: str, words: str, said: str
) -> None:
    cluster.write(**{f"refuse_{verb}": words})
    assert launch() == 1
    err = capfd.readouterr().err
    assert words in err
    assert said in err
    assert cluster.verbs[-1] == ("delete" if verb == "patch" else "create"), "what was created is removed again"


def test_a_job_that_is_deleted_by_somebody(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.write(resumed="gone")
    assert launch() == 1
    assert "it was deleted" in capfd.readouterr().err


def test_ctrl_c_deletes_the_job(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.write(resumed="image", linger="3")

    def interrupt() -> None:
        wait_for(lambda: "get" in cluster.verbs, "it waits for its pods")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    (cluster.directory / "asked").touch()
    thread.start()
    try:
        assert launch() == 130
    finally:
        thread.join()
    assert cluster.verbs.count("delete") == 1
    assert cluster.verbs[cluster.verbs.index("delete") :].count("get") >= 4, "the pods' end is waited for"
    assert "SIGINT: Kubernetes job train is cancelled; waiting for its end" in capfd.readouterr().err


def test_a_job_is_deleted_that_kubectl_may_have_created(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lose_answer(command: Sequence[str], **options: Any) -> object:
        done = submission.run_client(command, **options)
        if "create" in command:
            raise submission.NoAnswerError("kubectl has not answered within 60 s")
        return done

    monkeypatch.setattr(kubernetes_submission, "run_client", lose_answer)
    assert launch() == 1
    assert "kubectl has not answered within 60 s" in capfd.readouterr().err
    assert cluster.verbs == ["create", "delete"]
    created, deleted = cluster.asked
    label = json.loads(created["stdin"])["metadata"]["labels"]["reigen-submission"]
    assert f"--selector=reigen-submission={label}" in deleted["argv"], "it, and no other's"


@pytest.mark.parametrize(
    ("words", "may_exist"),
    [
        ("error: unexpected EOF", True),
        ("Error from server (Timeout): the server was unable to return a response in the time allotted", True),
        ('Error from server (AlreadyExists): jobs.batch "train" already exists', False),
        ("The connection to the server 127.0.0.1:8080 was refused: connection refused", False),
    ],
)
def test_a_job_that_an_error_leaves_in_doubt_is_deleted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, words: str, may_exist: bool
) -> None:
    def lose_answer(command: Sequence[str], **options: Any) -> object:
        done = submission.run_client(command, **options)
        return subprocess.CompletedProcess(command, 1, "", words) if "create" in command else done

    monkeypatch.setattr(kubernetes_submission, "run_client", lose_answer)
    assert launch() == 1
    assert cluster.verbs == ["create", *["delete"] * may_exist]


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch() == 1
    assert "cannot start kubectl: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobname", "My_Job"], "--jobname My_Job: must begin with a letter"),
        (["--kube-server-image", "other"], "servers run in the workers' pods"),
        (["--kube-server-template", "x.yaml"], "servers run in the workers' pods"),
        (["--kube-worker-template", "/nowhere.yaml"], "cannot be read"),
        (["--pods", "5"], "--pods 5"),
        (["--worker-memory", "much"], "--worker-memory much: it is no size of memory"),
    ],
)
def test_options_that_cannot_be(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        launch(*arguments)
    assert said in capsys.readouterr().err
    assert not (cluster.directory / "asked").exists()


# ---------------------------------------------------------------- states of jobs


def pod(index: int, state: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"name": f"j-{index}-x", "annotations": {"batch.kubernetes.io/job-completion-index": str(index)}},
        "spec": {"containers": [{"name": "main"}, {"name": "side"}]},
        "status": {
            "containerStatuses": [{"name": "side", "state": {"running": {}}}, {"name": "main", "state": state}],
            **status,
        },
    }


def job(condition: str = "", **more: str) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True", **more}] if condition else []
    return {"kind": "Job", "metadata": {"name": "j"}, "spec": {"completions": 2}, "status": {"conditions": conditions}}


ENDED = {"terminated": {"exitCode": 3, "reason": "Error"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@pytest.mark.parametrize(
    ("items", "phase", "code", "reason"),
    [
        ([job("Complete")], SubmittedPhase.ENDED, 0, ""),
        ([job("Failed"), pod(1, KILLED), pod(0, ENDED)], SubmittedPhase.ENDED, 3, ""),
        ([job("Failed"), pod(1, KILLED)], SubmittedPhase.ENDED, 137, "pod j-1-x: OOMKilled"),
        ([job("Failed"), pod(1, ENDED)], SubmittedPhase.ENDED, 3, "pod j-1-x: exit code 3"),
        (
            [job("Failed"), pod(1, {}, phase="Failed", reason="Evicted", message="low on memory")],
            SubmittedPhase.ENDED,
            1,
            "pod j-1-x: Evicted: low on memory",
        ),
        (
            [job("Failed", reason="DeadlineExceeded", message="too long")],
            SubmittedPhase.ENDED,
            None,
            "the Job has failed: DeadlineExceeded: too long",
        ),
        ([], SubmittedPhase.ENDED, None, "the Job is not there any more: it was deleted"),
        ([job()], SubmittedPhase.WAITING, None, "0 of 2 pods are there"),
        ([job(), pod(1, {"running": {}})], SubmittedPhase.WAITING, None, "1 of 2 pods are there"),
        ([job(), pod(0, {"running": {}})], SubmittedPhase.RUNNING, None, ""),
        (
            [job(), pod(0, {"waiting": {"reason": "ErrImagePull", "message": "no such image"}})],
            SubmittedPhase.WAITING,
            None,
            "pod j-0-x: ErrImagePull: no such image",
        ),
        (
            [
                job(),
                pod(
                    0,
                    {},
                    conditions=[
                        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
                    ],
                ),
            ],
            SubmittedPhase.WAITING,
            None,
            "pod j-0-x: Unschedulable: no GPU",
        ),
    ],
)
def test_states(items: list[dict[str, Any]], phase: SubmittedPhase, code: int | None, reason: str) -> None:
    state = read_status("j", items).state
    assert (state.phase, state.exit_code, state.reason) == (phase, code, reason)


def test_a_suspended_job_says_so() -> None:
    suspended = {**job(), "spec": {"suspend": True}}
    assert "suspended" in read_status("j", [suspended]).state.reason


def test_events_say_why_there_are_no_pods() -> None:
    events = [
        {"type": "Normal", "reason": "Created", "message": "x"},
        {"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus"},
    ]
    assert explain_events(events) == "FailedCreate: exceeded quota: gpus"
    assert explain_events([]) == ""


# ---------------------------------------------------------------- times of lines


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_lines_in_pieces(piece: int) -> None:
    stamps, data = LineStamps(), b"2026-01-01T00:00:00.1Z a\n2026-01-01T00:00:00.1Z b c\n2026-01-01T00:00:01Z \n"
    out = b"".join(stamps.feed(data[at : at + piece]) for at in range(0, len(data), piece))
    assert out + stamps.finish() == b"a\nb c\n\n"


def test_known_lines_are_dropped_and_others_of_the_same_time_are_not() -> None:
    stamps = LineStamps()
    assert (
        stamps.feed(b"2026-01-01T00:00:00.5Z a\n2026-01-01T00:00:00.75Z b\n2026-01-01T00:00:00.75Z c\n") == b"a\nb\nc\n"
    )
    stamps.restart()
    again = (
        b"2026-01-01T00:00:00.5Z a\n2026-01-01T00:00:00.75Z b\n2026-01-01T00:00:00.75Z c\n2026-01-01T00:00:00.75Z d\n"
    )
    assert stamps.feed(again + b"2026-01-01T00:00:00.8Z e\n") == b"d\ne\n"


@pytest.mark.parametrize("longest", [7, 1000])
def test_a_log_that_is_cut_anywhere_loses_nothing(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_log, "_LONGEST_LINE_BYTES", 25 + longest)
    texts = [b"a\n", b"b" * 60 + b"\n", b"\n", b"c" * 40 + b"\n", b"no end"]
    log = b"".join(b"2026-01-01T00:00:00.%dZ " % time + text for time, text in zip((1, 2, 2, 2, 3), texts, strict=True))
    for first in range(len(log) + 1):
        for second in range(0, len(log) + 1, 7):
            stamps, out = LineStamps(), b""
            for end in (first, second, len(log)):
                stamps.restart()
                out += b"".join(stamps.feed(log[at : min(at + 9, end)]) for at in range(0, end, 9))
            assert out + stamps.finish() == b"".join(texts), (first, second)


def test_a_line_without_end_is_bounded() -> None:
    stamps = LineStamps()
    line = b"x" * 3_000_000
    out = b"".join(
        stamps.feed(piece) for piece in (b"2026-01-01T00:00:00Z ", line[:2_000_000], line[2_000_000:], b"\n")
    )
    assert out == line + b"\n"
