"""`reigen check --report`: what an issue should tell, and nothing that is secret."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from reigen import __version__
from reigen.cli.issue_report import _gpus, environment_facts, redact, redact_variable
from reigen.cli.main import main

PROJECT = Path(__file__).parents[3]
SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa55word@host.example/path", "https://<hidden>@host.example/path"),
        ("http://proxy:8080", "http://proxy:8080"),
        ("s3://bucket/key?X-Amz-Signature=0a1b2c&region=eu", "s3://bucket/key?X-Amz-Signature=<hidden>&region=eu"),
        ("--api-key=abc123 --steps 3", "--api-key=<hidden> --steps 3"),
        ("Authorization: Bearer abc.def", "Authorization: <hidden>"),
        ("password: hunter2, next", "password: <hidden>, next"),
        ("uses hf_abcdefgh1234", "uses <hidden>"),
        ("0123456789abcdef0123456789abcdef", "<hidden>"),
        ("/home/erika/data and /Users/erika, /srv/erika/x", "~/data and ~, ~/x"),
        ("/srv/erikas/x", "/srv/erikas/x"),
        ("Linux 6.18.44-fc-v669 x86_64, gloo,shm", "Linux 6.18.44-fc-v669 x86_64, gloo,shm"),
        ("/usr/lib/python3.11/site-packages/reigen_with_a_very_long_directory_name_1", None),
    ],
)
def test_texts_without_what_is_secret(text: str, shown: str | None) -> None:
    assert redact(text, "/srv/erika") == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("name", "is_shown"),
    [
        ("REIGEN_SECRET", False),
        ("REIGEN_METRICS_TOKEN", False),
        ("HOROVOD_SECRET_KEY", False),
        ("RAY_REDIS_PASSWORD", False),
        ("SLURM_JWT", False),
        ("SLURM_JOB_USER", False),
        ("REIGEN_DEADLINE", True),
        ("HOROVOD_FUSION_THRESHOLD", True),
        ("MXNET_KVSTORE_BIGARRAY_BOUND", True),
    ],
)
def test_variables_that_are_secrets_by_their_names(name: str, is_shown: bool) -> None:
    assert redact_variable(name, "1000") == ("1000" if is_shown else "<hidden>")


def test_of_the_environment_only_what_concerns_jobs_is_told() -> None:
    environ = {"AWS_ACCESS_KEY_ID": SECRET, "TF_VAR_x": SECRET, "EDITOR": "vi", "OMP_NUM_THREADS": "2"}

    facts = list(environment_facts(environ))
    assert [fact for fact in facts if fact[0] == "variables"] == [("variables", "OMP_NUM_THREADS", "2")]
    assert ("knobs", "set", "none") in facts


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REIGEN_METRICS_TOKEN", "HOROVOD_SECRET_KEY", "AWS_SECRET_ACCESS_KEY", "UNRELATED"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("HOROVOD_TIMELINE", f"s3://me:{SECRET}@bucket/t.json")
    monkeypatch.setenv("REIGEN_DEADLINE", "30")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOME", "/srv/erika")
    monkeypatch.setenv("PYTHONPATH", "/srv/erika/src")


@pytest.mark.usefixtures("secrets")
def test_the_report_is_a_block_to_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--report"]) == 0
    out = capsys.readouterr().out

    lines = out.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == ("```text", "a job can run here", "```")
    assert "`" not in "".join(lines[1:-1])
    assert SECRET not in out
    assert "erika" not in out
    for part in (__version__, "deadline_seconds", "30.0 (default: 600.0), set by REIGEN_DEADLINE", "no effect", "shm:"):
        assert part in out


@pytest.mark.usefixtures("secrets")
def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--report", "--json"]) == 0
    out = capsys.readouterr().out

    document = json.loads(out)
    assert document["reigen"] == __version__
    assert document["can_run"] is True
    assert SECRET not in out
    found = {(each["topic"], each["name"]): each["value"] for each in document["findings"]}
    assert found["variables", "HOROVOD_TIMELINE"] == "s3://<hidden>@bucket/t.json"
    assert found["variables", "PYTHONPATH"] == "~/src"
    assert {("system", "processor"), ("system", "GPU 0"), ("frameworks", "torch"), ("backends", "CUDA")} <= set(found)


def test_a_wrong_knob_is_in_the_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REIGEN_DEADLINE", "soon")

    assert main(["check", "--report"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM: REIGEN_DEADLINE=soon: expected a number of seconds" in out
    assert "no job can run here" in out


def test_the_report_is_about_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--report", "--hosts", "h1"])
    assert "about this host alone" in capsys.readouterr().err


def test_gpus_are_what_nvidia_smi_says(tmp_path: Path) -> None:
    program = tmp_path / "smi.py"
    program.write_text("print('H100, 81559 MiB, 570.1, 9.0')\nprint('H100, 81559 MiB, 570.1, 9.0')\n")
    assert _gpus([sys.executable, str(program)]) == ["H100, 81559 MiB, 570.1, 9.0"] * 2
    program.write_text("import sys; sys.exit('no devices were found')\n")
    assert _gpus([sys.executable, str(program)]) == ["none: nvidia-smi ended with 1: no devices were found"]
    program.write_text("import signal; signal.pause()\n")
    [line] = _gpus([sys.executable, str(program)], 0.2)
    assert "timed out" in line
    assert _gpus([str(tmp_path / "nothing")]) == ["none: there is no nvidia-smi"]


def test_the_template_of_issues_asks_for_it_and_the_citation_is_one() -> None:
    assert "reigen check --report" in (PROJECT / ".github/ISSUE_TEMPLATE/problem.md").read_text()
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == "Apache-2.0"
    assert citation["version"] == __version__
    is_released = f"## [{__version__}]" in (PROJECT / "CHANGELOG.md").read_text()
    assert ("date-released" in citation) == is_released


def test_what_a_misspelt_variable_holds_is_not_told() -> None:
    facts = list(environment_facts({"REIGEN_SECERT": SECRET, "REIGEN_DEADLINE": "5"}))

    assert ("variables", "REIGEN_SECERT", "<hidden>") in facts
    assert ("variables", "REIGEN_DEADLINE", "5") in facts
    assert not any(SECRET in text for fact in facts for text in fact)
