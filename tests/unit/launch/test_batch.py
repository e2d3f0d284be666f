"""Jobs of Grid Engine, LSF and PBS, from recorded variables and files; and what `reigen check` says of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from reigen.errors import ConfigError
from reigen.launch.base import AgentCommand, JobPlan, Launcher, find_launcher
from reigen.launch.batch import BatchJob, deal_slots, parse_host_lines, short_name
from reigen.launch.engines import check_engine, choose_launcher_in_engine, detect_engine
from reigen.launch.hosts import HostInfo
from reigen.launch.lsf import LsfLauncher, parse_mcpu_hosts
from reigen.launch.options import LaunchOptions
from reigen.launch.pbs import PbsLauncher
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.sge.allocation import parse_pe_hostfile
from reigen.launch.sge.environment import explain_parallel_environment, parse_settings
from reigen.launch.sge.launcher import SgeLauncher

#: As Grid Engine 8.1.9 writes it, of a job whose second host is in two queues.
PE_HOSTFILE = """\
node07.cluster 3 all.q@node07.cluster UNDEFINED
node02.cluster 1 all.q@node02.cluster UNDEFINED
node02.cluster 1 long.q@node02.cluster UNDEFINED
"""
#: A line for each slot, as PBS and LSF write them.
NODEFILE = "n7\nn7\nn7\nn2\nn2\n"


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host's name can be resolved, and this does not take a time-out."""

    def refuse(*arguments: object, **more: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A directory with all remote shells."""
    for name in ("qrsh", "blaunch", "pbs_tmrsh"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def engines(directory: Path, path: str = "") -> dict[str, dict[str, str]]:
    """The variables of a job with five slots on two hosts, by launcher."""
    (directory / "pe_hostfile").write_text(PE_HOSTFILE)
    (directory / "nodes").write_text(NODEFILE)
    common = {"PATH": path or str(directory)}
    return {
        "sge": common
        | {"JOB_ID": "17", "NSLOTS": "5", "PE_HOSTFILE": str(directory / "pe_hostfile")}
        | {"PE": "mpi", "SGE_TASK_ID": "undefined", "QUEUE": "all.q", "RESTARTED": "0"},
        "lsf": common | {"LSB_JOBID": "17", "LSB_MCPU_HOSTS": "n7 3 n2 2", "LSB_JOBINDEX": "0"},
        "pbs": common | {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(directory / "nodes")},
    }


def launch(name: str, environ: dict[str, str], num_ranks: int = 5, **more: object) -> Launcher:
    return find_launcher(name)(LaunchOptions(("true",), num_ranks, **more), environ)  # type: ignore[arg-type]


def plan(name: str, environ: dict[str, str], num_ranks: int = 5, **more: object) -> JobPlan:
    return launch(name, environ, num_ranks, **more).allocate(lambda seconds: None)


@pytest.mark.parametrize("name", ["sge", "lsf", "pbs"])
class TestEveryEngine:
    def test_its_job_is_found_by_all_of_its_variables_and_by_no_single_one(self, tools: Path, name: str) -> None:
        environ = engines(tools)[name]
        job = detect_engine(environ)
        assert job is not None
        assert (job.launcher, [host.slots for host in job.hosts]) == (name, [3, 2])
        assert "job 17" in job.description
        assert detect_engine({}) is None
        for variable, text in environ.items():
            assert detect_engine({variable: text}) is None
        assert choose_launcher_in_engine(None, environ).launcher == name
        assert choose_launcher_in_engine(None, {**environ, "REIGEN_RANK": "0"}).launcher == "ssh"

    def test_ranks_fill_hosts_in_the_order_of_the_job(self, tools: Path, name: str) -> None:
        assignments = plan(name, engines(tools)[name]).assignments
        assert [each.ranks for each in assignments] == [(0, 1, 2), (3, 4)]
        assert [short_name(each.host)[-1] for each in assignments] == ["7", "2"]
        assert [each.ranks for each in plan(name, engines(tools)[name], 2).assignments] == [(0, 1)]

    def test_more_ranks_than_slots_are_an_error_with_both_numbers(self, tools: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"gave this job 5 slots on 2 hosts \(.*\); -np 6 is more"):
            launch(name, engines(tools)[name], 6)

    def test_hosts_that_are_not_in_the_job_are_named(self, tools: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"n8, n9: not among the hosts of .* job 17"):
            launch(name, engines(tools)[name], 2, hosts=(HostInfo("n8", 1), HostInfo("n9", 1)))

    def test_a_remote_shell_that_is_missing_is_named(self, tools: Path, name: str) -> None:
        shell = {"sge": "qrsh", "lsf": "blaunch", "pbs": "pbs_tmrsh nor ssh"}[name]
        with pytest.raises(ConfigError, match=f"{shell} in PATH"):
            launch(name, engines(tools, path=str(tools / "nothing"))[name])

    def test_workers_and_servers_are_dealt_to_slots(self, tools: Path, name: str) -> None:
        servers = ServerOptions(2, round_robin_workers=True)
        assignments = plan(name, engines(tools)[name], 3, servers=servers).assignments
        roles = {
            short_name(each.host)[-1]: (each.ranks, [process.name for process in each.ps_processes])
            for each in assignments
        }
        counts = {
            host: len(ranks) + len([n for n in names if n != "scheduler"]) for host, (ranks, names) in roles.items()
        }
        assert sum(counts.values()) == 5
        assert max(counts.values()) <= 3

    def test_outside_of_a_job_it_says_how_to_get_into_one(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"--launcher {name}: this process is in no .*job of"):
            launch(name, {})

    def test_a_list_that_cannot_be_read_is_named(self, tools: Path, name: str) -> None:
        environ = engines(tools)[name]
        if name == "lsf":
            del environ["LSB_MCPU_HOSTS"]
            environ["LSB_DJOB_HOSTFILE"] = "/no/such/file"
        for variable in ("PE_HOSTFILE", "PBS_NODEFILE"):
            if variable in environ:
                environ[variable] = "/no/such/file"
        with pytest.raises(ConfigError, match="/no/such/file, cannot be read: No such file"):
            detect_engine(environ)

    def test_nothing_is_given_back(self, tools: Path, name: str) -> None:
        launcher = launch(name, engines(tools)[name])
        assert (list(launcher.close()), list(launcher.close())) == ([], [])


class TestLists:
    @pytest.mark.parametrize(
        ("text", "line"), [("h1", 1), ("h1 2\nh2 x q U", 2), ("h1 0 q U", 1), ("h1 -1", 1), ("\n h1 ²", 2)]
    )
    def test_a_wrong_line_of_grid_engines_is_named(self, text: str, line: int) -> None:
        with pytest.raises(ConfigError, match=f"line {line} of FILE is .*, not a host and its number of slots"):
            parse_pe_hostfile(text, "FILE")

    def test_queues_of_a_host_are_added_in_the_order_of_first_sight(self) -> None:
        assert parse_pe_hostfile(PE_HOSTFILE) == (HostInfo("node07.cluster", 3), HostInfo("node02.cluster", 2))

    @pytest.mark.parametrize(("text", "position"), [("h1", 2), ("h1 4 h2", 7), ("h1 x", 3), ("h1 4 h2 0", 8)])
    def test_a_wrong_word_of_lsfs_has_its_position(self, text: str, position: int) -> None:
        with pytest.raises(ConfigError, match=f"at position {position}, there is no number of slots"):
            parse_mcpu_hosts(text)

    @pytest.mark.parametrize("parse", [parse_pe_hostfile, parse_mcpu_hosts, lambda text: parse_host_lines(text, "F")])
    def test_an_empty_list_is_an_error(self, parse) -> None:  # type: ignore[no-untyped-def]
        for text in ("", " \n\n"):
            with pytest.raises(ConfigError, match="names no host"):
                parse(text)

    def test_a_line_with_two_hosts_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="line 2 of F is 'n2 n3', not one host"):
            parse_host_lines("n1\nn2 n3\n", "F")

    def test_slots_are_dealt_in_turn(self) -> None:
        dealt = deal_slots([HostInfo("a", 3), HostInfo("b", 1), HostInfo("c", 2)])
        assert "".join(host.name for host in dealt) == "abcaca"
        assert {host.slots for host in dealt} == {1}


class TestNames:
    def job(self, *names: str) -> BatchJob:
        return BatchJob(
            "sge", "Grid Engine", "1", "JOB_ID", tuple(HostInfo(name, 1) for name in names), "qsub -pe PE N"
        )

    def test_this_host_is_known_by_its_short_or_long_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: "node07")
        assert self.job("node07.cluster", "node08.cluster").is_this_host("node07.cluster")
        assert not self.job("node07.cluster", "node08.cluster").is_this_host("node08.cluster")
        monkeypatch.setattr(socket, "gethostname", lambda: "node07.cluster")
        assert self.job("node07").is_this_host("node07")
        # the exact name counts where there are two
        assert not self.job("node07.cluster", "node07.other").is_this_host("node07.other")

    def test_the_user_may_say_short_names(self) -> None:
        job = self.job("a.x", "b.x", "c.x", "c.y")
        assert [job.find_name(name) for name in ("a", "b.x", "b.y", "c", "c.y", "d")] == [
            "a.x",
            "b.x",
            "b.x",
            None,
            "c.y",
            None,
        ]

    def test_an_address_has_no_short_name(self) -> None:
        assert (short_name("10.0.0.1"), short_name("a.b.c")) == ("10.0.0.1", "a")


class TestGridEngine:
    def test_a_job_that_is_not_parallel_has_this_host_alone(self) -> None:
        environ = {"JOB_ID": "9", "SGE_TASK_ID": "undefined", "QUEUE": "all.q", "PATH": ""}
        choice = choose_launcher_in_engine(None, environ)
        assert (choice.launcher, choice.uses_hosts_of_engine) == ("ssh", False)
        assert "not a parallel one: submit it with -pe" in choice.reason
        with pytest.raises(ConfigError, match="Grid Engine job 9 is not a parallel one: submit it with qsub -pe"):
            launch("sge", environ)

    def test_arrays_and_restarts_are_told_of(self, tools: Path) -> None:
        environ = engines(tools)["sge"] | {"SGE_TASK_ID": "3", "RESTARTED": "1"}
        job = detect_engine(environ)
        assert job is not None
        assert "in the parallel environment mpi, task 3 of an array" in job.description
        assert job.description.endswith(", started again")

    def test_ranks_have_the_number_of_their_task_and_nothing_of_qrsh(self, tools: Path) -> None:
        for task, removed in (("3", False), ("undefined", True)):
            environ = engines(tools)["sge"] | {"SGE_TASK_ID": task}
            for each in plan("sge", environ).assignments:
                for variables in each.rank_environs:
                    assert ("SGE_TASK_ID" in variables) == removed
                    assert variables["QRSH_COMMAND"] is None

    def test_the_agents_command_is_quoted_for_the_shell_there(
        self, tools: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tools / "qrsh").write_text('#!/bin/sh\nprintf "%s|" "$@" >"$0.words"\nenv >"$0.environ"\n')
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        monkeypatch.setenv("QRSH_WRAPPER", "/bin/echo")
        launcher = launch("sge", engines(tools)["sge"])
        assert isinstance(launcher, SgeLauncher)
        client = launcher.start_agent("n2", AgentCommand("/a b/python", {"PYTHONPATH": "/c d"}))
        client.communicate(timeout=60)
        words = (tools / "qrsh.words").read_text()
        assert words == "-inherit|n2|exec env 'PYTHONPATH=/c d' '/a b/python' -P -m reigen.launch.agent|"
        assert "QRSH_WRAPPER" not in (tools / "qrsh.environ").read_text()

    @pytest.mark.parametrize(
        ("output", "what"),
        [
            (
                "error: executing task of job 1 failed: failed sending task to execd@h9: can't resolve host name",
                "its name cannot be resolved",
            ),
            (
                "failed sending task to execd@h2: got send error\nerror: got select error (Connection refused)",
                "its execution daemon does not answer",
            ),
            ("error: something new", "qrsh failed: error: something new"),
            ("bash: line 1: /no/python: No such file or directory", "there is no "),
        ],
    )
    def test_the_words_of_qrsh_are_understood(self, tools: Path, output: str, what: str) -> None:
        launcher = launch("sge", engines(tools)["sge"])
        assert isinstance(launcher, SgeLauncher)
        assert what in launcher.explain_exit("n2", 127 if "python" in output else 1, output).what

    def test_a_parallel_environment_must_control_its_slaves(self) -> None:
        shown = "pe_name            mpi\nslots              999\ncontrol_slaves     {}\nuser_lists a \\\n b\n"
        assert parse_settings(shown.format("TRUE"))["user_lists"] == "a b"
        assert not explain_parallel_environment("mpi", parse_settings(shown.format("TRUE")))
        assert "mpi has control_slaves FALSE" in explain_parallel_environment(
            "mpi", parse_settings(shown.format("FALSE"))
        )

    def test_the_check_looks_at_the_parallel_environment(self, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        environ = engines(tools)["sge"]
        for settings, expected in (
            ("control_slaves TRUE", ""),
            ("control_slaves FALSE", "control_slaves FALSE, so qrsh"),
        ):
            (tools / "qconf").write_text(f"#!/bin/sh\necho pe_name $2\necho {settings}\n")
            (tools / "qconf").chmod(0o755)
            if expected:
                with pytest.raises(ConfigError, match=expected):
                    check_engine("sge", environ)
            else:
                assert check_engine("sge", environ) == ""
        (tools / "qconf").write_text("#!/bin/sh\necho 'mpi is not a parallel environment' >&2\nexit 1\n")
        assert "the parallel environment mpi could not be looked at" in check_engine("sge", environ)


class TestLsf:
    def test_a_host_without_slots_for_computing_is_left_out(self, tools: Path) -> None:
        environ = engines(tools)["lsf"] | {"LSB_MCPU_HOSTS": "batch2 1 c1 42 c2 42"}
        found = detect_engine(environ), detect_engine({**environ, "CSM_ALLOCATION_ID": "5"})
        assert [[host.name for host in job.hosts] for job in found if job] == [["batch2", "c1", "c2"], ["c1", "c2"]]

    def test_started_by_jsrun_it_would_be_many_jobs(self, tools: Path) -> None:
        with pytest.raises(ConfigError, match="jsrun has started `reigen run` 4 times"):
            detect_engine(engines(tools)["lsf"] | {"JSM_NAMESPACE_SIZE": "4"})

    def test_the_agents_command_runs_without_a_shell(self, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tools / "blaunch").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        launcher = launch("lsf", engines(tools)["lsf"])
        assert isinstance(launcher, LsfLauncher)
        output, _ = launcher.start_agent("n2", AgentCommand("/python", {"PYTHONPATH": "/c d"})).communicate(timeout=60)
        assert output == b"-no-shell|n2|env|PYTHONPATH=/c d|/python|-P|-m|reigen.launch.agent|"


class TestPbs:
    def test_without_its_own_remote_shell_ssh_is_used(self, tools: Path) -> None:
        (tools / "pbs_tmrsh").unlink()
        (tools / "ssh").write_text("#!/bin/sh\n")
        (tools / "ssh").chmod(0o755)
        launcher = launch("pbs", engines(tools)["pbs"])
        assert isinstance(launcher, PbsLauncher)
        assert launcher.agents.remote_shell[0] == "ssh"
        assert check_engine("pbs", engines(tools)["pbs"]) == "there is no pbs_tmrsh in PATH: ssh is used"
