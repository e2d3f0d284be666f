"""The command line, in this process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reigen._version import __version__
from reigen.cli import check
from reigen.cli.check import collect_results
from reigen.cli.main import COMMANDS, main
from reigen.cli.run_options import make_parser


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"reigen {__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["dance"], ["--dance"]])
def test_what_is_no_command(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "reigen: error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-np", "0", "true"], "must be at least 1, not 0"),
        (["-np", "-3", "true"], "must be at least 1, not -3"),
        (["-np", "two", "true"], "invalid int value: 'two'"),
        (["-np", "2"], "no command to run"),
        (["true"], "required: -np/--num-proc"),
        (["-np", "3", "-H", "localhost:2", "true"], "the hosts have 2 slots, and 3 processes were asked for"),
        (["-np", "3", "-H", "a.invalid:4", "--launcher", "local", "true"], "a.invalid cannot be reached without ssh"),
        (["-np", "3", "--ssh-port", "70000", "true"], "the ssh port must be from 1 to 65535, not 70000"),
        (["-np", "3", "-i", "/nowhere/key", "true"], "--ssh-identity-file /nowhere/key: there is no such file"),
        (["-np", "3", "--sync-dst-dir", "", "true"], "--sync-dst-dir names no directory"),
        (["-np", "3", "--ssh-command", "'", "true"], "--ssh-command ': No closing quotation"),
        (["-np", "3", "-x", "NO_SUCH_VARIABLE", "true"], "-x NO_SUCH_VARIABLE: there is no such variable"),
        (["-np", "3", "-hostfile", "/nowhere", "true"], "hostfile '/nowhere' cannot be read"),
        (["-np", "3", "--config-file", "/nowhere", "true"], "cannot read the configuration file /nowhere"),
        (["-np", "3", "--config-file", __file__, "true"], "test_cli.py is no YAML"),
        (["-np", "3", "--min-np", "4", "true"], "--min-np 4 is more than -np 3"),
        (["-np", "3", "--max-np", "2", "true"], "-np 3 is more than --max-np 2"),
        (["--min-np", "0", "true"], "--min-np must be at least 1, not 0"),
        (["--host-discovery-script", "x", "true"], "an elastic job needs --min-np"),
        (["-np", "3", "--blacklist", "seat", "true"], "--blacklist is about elastic jobs"),
        (["--min-np", "3", "--blacklist-cooldown-range", "2", "1", "true"], "--blacklist-cooldown-range 2 1: it must"),
        (["--min-np", "3", "-H", "localhost:2", "true"], "the hosts have 2 slots, and 3 processes are needed at least"),
        (
            ["--min-np", "3", "-s", "1", "true"],
            "how many workers an elastic job may have: --max-np",
        ),
        (["--min-np", "3", "-np", "3", "-s", "1", "--server-hosts", "x", "true"], "run on the launcher's host"),
        (["--min-np", "3", "-np", "3", "-s", "1", "--spares", "1", "true"], "no state that a spare could wait for"),
        (
            ["--min-np", "3", "-np", "3", "-s", "1", "--on-launcher-loss", "continue", "true"],
            "the servers of an elastic job end with its launcher",
        ),
        (["--min-np", "3", "--as-horovod", "true"], "Cannot run in fault tolerance mode with fewer than 2 hosts."),
        (["--min-np", "3", "--torchrun-env", "true"], "torch.distributed cannot follow the members"),
        (["-np", "3", "--cache-capacity=-2", "true"], "cache_capacity=-2 must be >= 0"),
        (["-np", "2", "--grace-seconds", "-1", "true"], "grace must be a number of seconds"),
        (["-np", "2", "--bind", "sockets", "true"], "invalid choice: 'sockets'"),
    ],
)
def test_options_of_run_that_make_no_sense(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_check_build_has_the_form_of_horovodruns(flag, capsys, monkeypatch):
    versions = {"torch": "9.9", "mxnet": "1.9.1", "jax": "0.10", "mpi4py": "4.1", "tensorflow-cpu": "2.21"}

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise check.metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(check.metadata, "version", version)
    assert main(["run", flag]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"Reigen v{__version__}:"
    assert [line for line in rest if line.startswith("Available")] == [
        "Available Frameworks:",
        "Available Controllers:",
        "Available Tensor Operations:",
    ]
    assert {f"    [X] {name}" for name in ("TensorFlow", "PyTorch", "MXNet", "JAX")} < set(rest)
    assert "    [ ] Keras" in rest
    assert [line for line in rest if line.endswith(" MPI")] == ["    [ ] MPI", "    [X] MPI"]  # controls no job
    assert {"    [X] Shared memory", "    [X] TCP"} < set(rest)


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version_of_run(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"reigen {__version__}\n"


def test_check_says_what_is_here_and_that_a_job_can_run(capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    for part in ("numpy", "torch", "mxnet", "memfd", "pidfd", "processors", "shm: all 2 ranks run on this host"):
        assert part in out
    assert out.endswith("a job can run here\n")


def test_check_fails_where_no_job_can_run(capsys, monkeypatch):
    monkeypatch.setenv("REIGEN_PLANE", "pigeons")
    assert main(["check"]) == 1
    assert "problem: for -np 2: REIGEN_PLANE=pigeons" in capsys.readouterr().out


def test_check_finds_what_is_missing(monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.pidfd_open", refuse)
    monkeypatch.setattr("os.memfd_create", refuse)
    problems = [finding.name for finding in collect_results({}) if finding.is_problem]
    assert problems == ["memfd", "pidfd"]


def test_check_imports_no_framework(monkeypatch):
    monkeypatch.setattr(check.metadata, "version", lambda name: {"torch": "9.9"}.get(name, "1.0"))
    assert {finding.value for finding in collect_results({}) if finding.name == "torch"} == {"9.9"}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--timeline-mark-cycles", "mark the engine's cycles in it"),
        ("--no-timeline-mark-cycles", "do not mark the engine's cycles in it"),
        ("--stall-check", "look for stalled collectives"),
        ("--no-stall-check", "do not look for stalled collectives"),
        ("--log-with-timestamp", "put the time before each message"),
        ("--log-hide-timestamp", "do not put the time before each message"),
    ],
)
def test_the_two_forms_of_a_switch_say_opposite_things(option: str, text: str) -> None:
    [action] = [action for action in make_parser()._actions if option in action.option_strings]
    assert action.help == text


def test_check_says_that_this_is_a_cluster_of_rays():
    def said(environ: dict[str, str]) -> list[str]:
        return [finding.value for finding in collect_results(environ) if finding.name == "Ray"]

    assert said({}) == []
    (words,) = said({"RAY_ADDRESS": "h1:6379"})
    assert words.startswith("RAY_ADDRESS=h1:6379, ray ")
    assert "reigen.ray" in words


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_a_report_may_be_read_in_part(command: str, tmp_path: Path) -> None:
    """`reigen migrate . | head` says nothing of a broken pipe."""
    (tmp_path / "train.py").write_text("import horovod.torch as hvd\n" + "hvd.nothing()\n" * 3)
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [command, *([str(tmp_path)] if command == "migrate" else [])]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "reigen", *arguments], stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")
