"""Manifests of jobs, by the schemas of Kubernetes itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reigen.errors import ConfigError
from reigen.launch.kubernetes.manifest import (
    KubernetesJob,
    ProcessResources,
    check_name,
    escape_word,
    make_job,
    make_manifests,
    make_name,
    make_secret,
)
from reigen.launch.kubernetes.yaml_files import dump_manifests, read_template
from tests.unit.launch.schemas import check_schema

SECRET = "5e" * 32
JOB = KubernetesJob("train", "registry/image:1", ("reigen", "launch", "-n", "8", "python", "t.py"), 8, 2)


def pod_of(job: KubernetesJob) -> dict[str, Any]:
    return make_job(job)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container_of(job: KubernetesJob) -> dict[str, Any]:
    return pod_of(job)["containers"][0]  # type: ignore[no-any-return]


def environ_of(job: KubernetesJob) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container_of(job)["env"] if "value" in each}


TEMPLATE = yaml.safe_load("""
apiVersion: batch/v1
kind: Job
metadata: {name: ignored, annotations: {owner: me}, labels: {team: vision}}
spec:
  ttlSecondsAfterFinished: 60
  template:
    metadata: {annotations: {sidecar.istio.io/inject: "false"}}
    spec:
      nodeSelector: {pool: gpu}
      terminationGracePeriodSeconds: 300
      securityContext: {runAsUser: 1000, fsGroup: 1000}
      containers:
      - name: main
        image: registry/other:2
        env: [{name: MINE, value: "1"}, {name: TOKEN, valueFrom: {secretKeyRef: {name: t, key: k}}}]
        resources: {limits: {example.com/nic: "1"}}
        volumeMounts: [{name: data, mountPath: /data}, {name: big, mountPath: /dev/shm}]
      - {name: sidecar, image: registry/sidecar:1}
      volumes:
      - {name: data, persistentVolumeClaim: {claimName: data}}
      - {name: big, emptyDir: {medium: Memory}}
""")


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, num_servers=2, workers=ProcessResources(2, "4g", 1), servers=ProcessResources(1, "512m")),
        replace(JOB, namespace="space", queue="research", environ={"A": "$(B) $$"}),
        replace(JOB, image=None, template=TEMPLATE),
    ],
    ids=["plain", "resources", "queue", "template"],
)
def test_all_versions_of_kubernetes_take_the_manifests(job: KubernetesJob) -> None:
    for manifest in [make_job(job), make_job(job, suspend=True), make_secret(job, SECRET, "uid-1")]:
        check_schema(manifest)
    for manifest in [*make_manifests(job), *make_manifests(job, "uid-1")]:
        check_schema(manifest)


def test_a_job_of_pods_with_numbers_and_names() -> None:
    spec = make_job(JOB)["spec"]
    assert {name: spec[name] for name in ("completionMode", "completions", "parallelism", "backoffLimit")} == {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
    }
    pod, (service, policy) = spec["template"]["spec"], make_manifests(JOB)
    assert (pod["subdomain"], service["metadata"]["name"]) == ("train", "train")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    labels = spec["template"]["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    assert (pod["restartPolicy"], pod["automountServiceAccountToken"]) == ("Never", False)
    environ = environ_of(JOB)
    assert (environ["REIGEN_NODES"], environ["REIGEN_GRACE"]) == ("2", str(pod["terminationGracePeriodSeconds"]))


def test_the_secret_is_a_file_of_the_owner_alone() -> None:
    secret, pod = make_secret(JOB, SECRET), pod_of(JOB)
    assert secret["stringData"] == {"secret": SECRET}
    (volume,) = [each["secret"] for each in pod["volumes"] if "secret" in each]
    assert (volume["secretName"], oct(volume["defaultMode"])) == (secret["metadata"]["name"], "0o400")
    (mount,) = [each for each in container_of(JOB)["volumeMounts"] if each["name"] == "reigen-secret"]
    assert environ_of(JOB)["REIGEN_SECRET_FILE"] == f"{mount['mountPath']}/secret"
    assert SECRET not in dump_manifests([*make_manifests(JOB), make_job(JOB)])


def test_what_belongs_to_the_job_goes_with_it() -> None:
    for manifest in [*make_manifests(JOB, "uid-1"), make_secret(JOB, SECRET, "uid-1")]:
        assert manifest["metadata"]["ownerReferences"] == [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "uid-1"}
        ]


def test_a_pod_has_the_resources_of_its_processes() -> None:
    job = replace(JOB, num_servers=3, workers=ProcessResources(2, "4g", 1), servers=ProcessResources(1, "100m"))
    assert container_of(job)["resources"] == {
        "requests": {"cpu": "10", "memory": "16584Mi"},  # 4 workers and up to 2 servers
        "limits": {"memory": "16584Mi", "nvidia.com/gpu": "4"},
    }
    (shm,) = [each["emptyDir"] for each in pod_of(job)["volumes"] if "emptyDir" in each]
    assert shm == {"medium": "Memory", "sizeLimit": "6Gi"}
    assert container_of(JOB)["resources"] == {}


def test_words_that_kubernetes_would_replace_arrive_as_they_are() -> None:
    words = ("a b", "$(HOME)", "$HOME", "$$", "$", '"', "'", "\n", "x=é")
    job = replace(JOB, command=("reigen", *words), environ={"TEXT": "$(NAME)"})
    assert [expand(word) for word in container_of(job)["args"]] == [*words]
    assert expand(environ_of(job)["TEXT"]) == "$(NAME)"
    assert dump_manifests([make_job(job)]) == dump_manifests([make_job(job)])
    assert yaml.safe_load(dump_manifests([make_job(job)])) == make_job(job)
    assert escape_word("$(A)$") == "$$(A)$$"


def expand(text: str) -> str:
    """As the kubelet does (third_party/forked/golang/expansion): here no variable is known, and a reference stays."""
    found, position = "", 0
    while position < len(text):
        if text[position] == "$" and position + 1 < len(text):
            assert text[position + 1] != "(", f"{text!r} refers to a variable"
            found += "$" if text[position + 1] == "$" else text[position : position + 2]
            position += 2
        else:
            found += text[position]
            position += 1
    return found


def test_a_template_is_kept_where_it_says_nothing_else() -> None:
    manifest = make_job(replace(JOB, image=None, template=TEMPLATE))
    assert manifest["metadata"]["name"] == "train"
    assert manifest["metadata"]["annotations"] == {"owner": "me"}
    assert manifest["metadata"]["labels"]["team"] == "vision"
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 60
    pod = manifest["spec"]["template"]
    assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    main, sidecar = pod["spec"]["containers"]
    assert (main["name"], main["image"], sidecar["name"]) == ("main", "registry/other:2", "sidecar")
    assert (pod["spec"]["nodeSelector"], pod["spec"]["securityContext"]["fsGroup"]) == ({"pool": "gpu"}, 1000)
    environ = {each["name"]: each.get("value") for each in main["env"]}
    assert (environ["MINE"], environ["REIGEN_GRACE"], "TOKEN" in environ) == ("1", "300", True)
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["data", "big", "reigen-secret"]
    assert main["resources"]["limits"] == {"example.com/nic": "1"}
    assert TEMPLATE["metadata"]["name"] == "ignored", "the template itself is left alone"


def test_templates_of_other_kinds() -> None:
    spec = {"containers": [{"name": "c", "image": "i"}], "nodeSelector": {"a": "b"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "n", "labels": {"a": "b"}}, "spec": spec}
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": spec},
    }
    for each in (spec, pod, template):
        manifest = make_job(replace(JOB, image=None, template=each))
        check_schema(manifest)
        assert manifest["spec"]["template"]["spec"]["nodeSelector"] == {"a": "b"}
    with pytest.raises(ConfigError, match="this is Deployment"):
        make_job(replace(JOB, template={"kind": "Deployment", "spec": {}}))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"kind": "Job", "spec": {"completions": 5}}, "completions must be 2, not 5"),
        ({"kind": "Job", "spec": {"backoffLimit": 6}}, "backoffLimit must be 0, not 6"),
        ({"containers": [{}], "restartPolicy": "OnFailure"}, "restartPolicy must be Never"),
        ({"containers": [{"env": [{"name": "REIGEN_NODES", "value": "1"}]}]}, "REIGEN_NODES is set by the manifests"),
        ({"containers": [{"env": [{"name": "REIGEN_SECRET", "value": "1"}]}]}, "REIGEN_SECRET is set by the manifests"),
        ({"a": 1}, "of no kind, without containers"),
    ],
)
def test_templates_that_contradict(template: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_job(replace(JOB, template=template))


def test_template_files(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    for text, said in (
        ("a: [", "no YAML"),
        ("a: 1\n---\nb: 1\n", "one document"),
        ("[1]", "one document"),
        ("", "one document"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_template(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_template(tmp_path / "none")
    file.write_text(yaml.safe_dump(TEMPLATE))
    assert read_template(file) == TEMPLATE


@pytest.mark.parametrize("name", ["", "A", "a_b", "a.b", "-a", "a-", "1a", "a" * 59, "ä"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="--jobname"):
        check_name(name)


def test_names_that_are_made() -> None:
    made = [
        make_name(command, "0a1b2c") for command in (["python", "/x/Train_It.py", "--lr", "1"], ["./a.out"], [], ["_"])
    ]
    assert made == ["reigen-train-it-0a1b2c", "reigen-a-0a1b2c", "reigen-0a1b2c", "reigen-0a1b2c"]
    for name in [*made, "a" * 58, make_name(["x" * 100 + ".py"], "0a1b2c")]:
        check_name(name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "A"}, "--jobname A: must begin with a letter"),
        ({"namespace": "My_Space"}, "--kube-namespace My_Space"),
        ({"num_pods": 9}, "--pods 9: must be from 1 to the number of workers, 8"),
        ({"num_pods": 0}, "--pods 0"),
        ({"workers": ProcessResources(0)}, "--worker-cores 0"),
        ({"workers": ProcessResources(gpus=-1)}, "--gpus -1"),
        ({"environ": {"REIGEN_SECRET": "x"}}, "--env REIGEN_SECRET"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(JOB, **changes)


def test_an_image_is_needed() -> None:
    with pytest.raises(ConfigError, match="--kube-worker-image"):
        make_job(replace(JOB, image=None))
