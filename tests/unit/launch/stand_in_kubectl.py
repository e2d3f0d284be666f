"""kubectl of a stand-in cluster with one Job, which is a directory: what it is asked for is kept there.

Files: ``refuse.VERB`` (its words and failure), ``asked`` (a line of JSON for each call), ``logs.N`` (what the Nth
`kubectl logs` prints, after which the connection ends), ``phase`` (of the Job), ``ends`` (that after the
last log), ``linger`` (how often pods are still there when the Job is not).
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(os.environ["STAND_IN_CLUSTER"])


def read(name: str, default: str = "") -> str:
    file = HERE / name
    return file.read_text() if file.exists() else default


def main(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("--namespace=")]
    verb = words[0]
    text = sys.stdin.read() if "--filename=-" in words else ""
    with (HERE / "asked").open("a") as file:
        print(json.dumps({"argv": arguments, "stdin": text, "environ": dict(os.environ)}), file=file)
    if refusal := read(f"refuse.{verb}"):
        if verb == "logs" and read("asked").count('"logs"') == 3:
            (HERE / "phase").write_text(read("ends", "done 0"))
        sys.stderr.write(refusal)
        return 1
    match verb:
        case "create":
            if "--output=jsonpath={.metadata.uid}" in words:
                print("uid-1", end="")
                (HERE / "phase").write_text(read("phase", "pending"))
        case "patch":
            (HERE / "phase").write_text(read("resumed", "running"))
        case "delete":
            (HERE / "phase").write_text(f"ending {linger}" if (linger := read("linger")) else "gone")
        case "get" if words[1] == "events":
            print(json.dumps({"items": json.loads(read("events", "[]"))}))
        case "get":
            print(json.dumps({"items": items(phase := read("phase"))}))
            if phase[:7] == "ending ":
                (HERE / "phase").write_text(f"ending {int(phase[7:]) - 1}" if phase[7:] != "1" else "gone")
        case "logs":
            number = int(read("log", "0"))
            (HERE / "log").write_text(str(number + 1))
            sys.stdout.write(read(f"logs.{number}"))
            if not (HERE / f"logs.{number + 1}").exists():
                (HERE / "phase").write_text(read("ends", "done 0"))
    return 0


def items(phase: str) -> list[dict]:
    if phase in {"", "gone"}:
        return []
    word, _, rest = phase.partition(" ")
    status: dict = {}
    state: dict = {"waiting": {"reason": "ContainerCreating"}}
    if word == "done":
        code = int(rest)
        status = {"conditions": [{"type": "Failed" if code else "Complete", "status": "True"}]}
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
    elif word in {"running", "ending"}:
        state = {"running": {}}
    elif word == "image":
        state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pod = {
        "kind": "Pod",
        "metadata": {
            "name": "train-0-abcde",
            "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"containers": [{"name": "reigen"}]},
        "status": {"containerStatuses": [{"name": "reigen", "state": state}]},
    }
    job = {"kind": "Job", "metadata": {"name": "train"}, "spec": {"completions": 2}, "status": status}
    return {"unborn": [job], "ending": [pod]}.get(word, [job, pod])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
