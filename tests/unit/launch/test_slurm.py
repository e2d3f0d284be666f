"""Slurm's lists and variables, the plan that follows from them, srun's command line, and what its failures mean."""

from __future__ import annotations

import os
import random
import re
import shlex
import stat
import subprocess
import time
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.cli import check, main
from reigen.errors import ConfigError
from reigen.launch.agent.agent_client import AgentClient
from reigen.launch.agent.agent_protocol import LINE_END
from reigen.launch.agent.lines import DialedLine
from reigen.launch.agent.rsync import rsync_command
from reigen.launch.base import AgentCommand, DialCall, HostProblem
from reigen.launch.engines import choose_launcher_in_engine, detect_engine
from reigen.launch.hosts import HostInfo, parse_hosts
from reigen.launch.local_plan import divide_gpus
from reigen.launch.options import LaunchOptions
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.slurm.allocation import divide_nodes, find_allocation
from reigen.launch.slurm.command import rank_variables, remote_shell, srun_command, step_command
from reigen.launch.slurm.launcher import SlurmLauncher
from reigen.launch.slurm.node_list import MAX_NODES, expand_counts, expand_node_list
from reigen.launch.slurm.step import find_step
from reigen.launch.slurm.step_starter import SlurmStepStarter
from reigen.launch.ssh.command import SshOptions
from reigen.launch.supervision.event_loop import LauncherLoop

#: A batch script on the first of three nodes.
BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[08-10]",
    "SLURM_TASKS_PER_NODE": "4,2(x2)",
    "SLURMD_NODENAME": "n08",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_LABELIO": "1",
}


@pytest.fixture
def path(tmp_path):
    """A PATH with an srun in it."""
    (tmp_path / "srun").touch(stat.S_IRWXU)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


# ---------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b", "a b"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[9-011]", "n9 n10 n11"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("n[1,3-5,9],login", "n1 n3 n4 n5 n9 login"),
        ("gpu-a[001],b.c.example", "gpu-a001 b.c.example"),
    ],
)
def test_lists_of_nodes(text, names):
    assert expand_node_list(text) == names.split()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'': at position 0, there is no name"),
        ("a,,b", "'a,,b': at position 2, there is no name"),
        ("a,", "'a,': at position 2, there is no name"),
        ("n[1-3", "'n[1-3': at position 1, the bracket is not closed"),
        ("n1-3]", "'n1-3]': at position 4, no bracket is open"),
        ("n[3-1]", "'n[3-1]': at position 2, the range 3-1 descends"),
        ("n[1,a-b]", "at position 4, 'a-b' is neither a number nor a range"),
        ("n[]", "at position 2, '' is neither"),
        ("n[1,,2]", "at position 4, '' is neither"),
        ("a b", "at position 1, no name has ' ' in it"),
        ("n[1-65537]", "more than 65536 names"),
        ("r[1-300]n[1-300]", "more than 65536 names"),
    ],
)
def test_lists_of_nodes_that_make_no_sense(text, complaint):
    with pytest.raises(ConfigError) as failed:
        expand_node_list(text, "SLURM_JOB_NODELIST")
    assert str(failed.value).startswith("SLURM_JOB_NODELIST ")
    assert complaint in str(failed.value)


def test_the_longest_list():
    assert len(expand_node_list(f"n[1-{MAX_NODES}]")) == MAX_NODES


def number_list(generator):
    """Numbers in brackets, as Slurm may compress them, and what they are."""
    parts, numbers = [], []
    for _ in range(generator.randint(1, 3)):
        width, low = generator.randint(1, 4), generator.randint(0, 99)
        high = low + generator.randint(0, 12)
        first = f"{low:0{width}d}"
        parts.append(first if high == low else f"{first}-{high:0{width}d}")
        numbers += [f"{number:0{len(first)}d}" for number in range(low, high + 1)]
    return f"[{','.join(parts)}]", numbers


@given(st.integers(0, 2**32))
def test_any_list_that_is_compressed_is_expanded(seed):
    generator = random.Random(seed)
    items, expected = [], []
    for _ in range(generator.randint(1, 4)):
        text, names = "", [""]
        for _ in range(generator.randint(1, 2)):
            word = generator.choice(["n", "rack-", "gpu.", "x9y"])
            numbers, each = number_list(generator)
            text, names = text + word + numbers, [name + word + number for name in names for number in each]
        items.append(text)
        expected += names
    assert expand_node_list(",".join(items)) == expected


@given(st.text("n[]-,019 a", max_size=12))
def test_every_text_is_a_list_or_an_error_with_the_text(text):
    try:
        names = expand_node_list(text)
    except ConfigError as error:
        assert repr(text) in str(error)
    else:
        assert names
        assert all(name and not set(name) & set("[], ") for name in names)


def test_lists_of_numbers():
    assert expand_counts("4,1(x2),3") == [4, 1, 1, 3]
    for text, position in (("", 0), ("4,x", 2), ("1(x", 0), ("1(x2),-3", 6)):
        with pytest.raises(ConfigError, match=rf"at position {position} is not like"):
            expand_counts(text)


# ---------------------------------------------------------------------------------------------- allocations


def test_the_allocation_of_a_batch_script():
    allocation = find_allocation({**BATCH, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1700000000"})
    assert allocation.hosts == tuple(parse_hosts("n08:4,n09:2,n10:2"))
    assert (allocation.job_id, allocation.node, allocation.num_restarts) == ("17", "n08", 2)
    assert allocation.description == (
        "Slurm job 17 (SLURM_JOB_ID) with 8 tasks on 3 nodes (4,2(x2)), started again 2 times"
    )


def test_old_names_of_variables():
    found = find_allocation({"SLURM_JOBID": "1", "SLURM_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1(x2)"})
    assert found.hosts == (HostInfo("a", 1), HostInfo("b", 1))


def test_components_of_a_heterogeneous_job_follow_each_other():
    allocation = find_allocation(
        {
            "SLURM_JOB_ID": "5",
            "SLURM_JOB_NODELIST": "a",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
            "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]",
            "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4(x2)",
        }
    )
    assert allocation.hosts == tuple(parse_hosts("a:1,b1:4,b2:4"))
    assert "--het-group=1" in srun_command(allocation, {}, "b2")
    assert remote_shell(allocation, {}) == ()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"SLURM_TASKS_PER_NODE": "4,2"}, "has 2 numbers, but SLURM_JOB_NODELIST 'n[08-10]' has 3 names"),
        ({"SLURM_TASKS_PER_NODE": "2(x4)"}, "has 4 numbers"),
        ({"SLURM_TASKS_PER_NODE": "many"}, "SLURM_TASKS_PER_NODE 'many': 'many' at position 0"),
        ({"SLURM_JOB_NODELIST": "n[8-"}, "SLURM_JOB_NODELIST 'n[8-': at position 1"),
        ({"SLURM_JOB_NODELIST": "a,b,a"}, "names a twice"),
        ({"SLURM_HET_SIZE": "two"}, "SLURM_HET_SIZE is 'two', not a number"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}, "srun has started `reigen run` 3 times"),
    ],
)
def test_variables_that_are_not_in_order(changes, complaint):
    with pytest.raises(ConfigError) as failed:
        find_allocation({**BATCH, **changes})
    assert complaint in str(failed.value)


def test_a_step_of_one_task_has_the_nodes_of_the_job_but_not_its_tasks():
    step = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert find_allocation({**BATCH, **step}).hosts == tuple(parse_hosts("n08:1,n09:1,n10:1"))


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "3"}, {"SLURM_JOB_NODELIST": "a"}, {"SLURM_CONF": "/x"}])
def test_no_allocation(environ):
    assert find_allocation(environ) is None


# ---------------------------------------------------------------------------------------------- choice


def test_the_launcher_is_slurms_in_a_job_of_several_nodes():
    choice = choose_launcher_in_engine(None, BATCH)
    assert (choice.launcher, choice.engine_job.num_slots, choice.uses_hosts_of_engine) == ("slurm", 8, True)


@pytest.mark.parametrize(
    ("named", "changes", "has_hosts", "launcher"),
    [
        ("local", {}, False, "local"),
        ("mpi", {}, False, "mpi"),
        (None, {}, True, "ssh"),
        (None, {"SLURM_JOB_NODELIST": "n08", "SLURM_TASKS_PER_NODE": "4"}, False, "ssh"),
        (None, {"REIGEN_RANK": "3"}, False, "ssh"),
    ],
)
def test_other_choices_in_a_job_of_slurms(named, changes, has_hosts, launcher):
    choice = choose_launcher_in_engine(named, {**BATCH, **changes}, has_hosts=has_hosts)
    assert (choice.launcher, choice.uses_hosts_of_engine) == (launcher, False)


def test_a_launcher_that_is_named_may_be_started_several_times():
    step = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert choose_launcher_in_engine("local", step).launcher == "local"
    with pytest.raises(ConfigError, match="leave srun out"):
        choose_launcher_in_engine(None, step)


def test_a_rank_is_in_no_engine():
    assert detect_engine({**BATCH, "REIGEN_RANK": "0"}) is None


# ---------------------------------------------------------------------------------------------- plans


def plan(num_ranks, environ, hosts="", **options):
    named = tuple(parse_hosts(hosts)) if hosts else ()
    launcher = SlurmLauncher(LaunchOptions(("true",), num_ranks, hosts=named, **options), environ)
    return launcher.allocate(lambda seconds: None)


def test_ranks_fill_the_nodes_in_order(path):
    found = plan(6, BATCH | path).assignments
    assert [(each.host, each.is_local, each.ranks) for each in found] == [
        ("n08", True, (0, 1, 2, 3)),
        ("n09", False, (4, 5)),
    ]


def test_on_a_login_host_every_node_is_another(path):
    environ = {name: text for name, text in (BATCH | path).items() if name != "SLURMD_NODENAME"}
    assert [each.is_local for each in plan(8, environ).assignments] == [False, False, False]


def test_the_user_may_say_which_node_takes_how_many(path):
    found = plan(4, BATCH | path, "n10:3,n08:1").assignments
    assert [(each.host, each.ranks) for each in found] == [("n10", (0, 1, 2)), ("n08", (3,))]


def test_servers_run_on_the_nodes_too(path):
    found = plan(8, BATCH | path, servers=ServerOptions(2)).assignments
    assert [len(each.ps_processes) for each in found] == [2, 1, 0]  # the scheduler is on this one


def test_a_rank_has_slurms_variables_of_its_own(path):
    [first, second, _] = plan(8, BATCH | path | {"PMI_RANK": "0"}).assignments
    own = second.rank_environs[1]
    assert own == {"PMI_RANK": None} | rank_variables(5, (1, 1), [4, 2, 2])
    expected = {"PROCID": "5", "LOCALID": "1", "NODEID": "1", "NTASKS": "8", "NPROCS": "8", "NNODES": "3"}
    assert {name: own[f"SLURM_{name}"] for name in expected} == expected
    assert own["SLURM_TASKS_PER_NODE"] == "4,2,2"
    assert own["SLURM_STEP_ID"] is None
    assert first.rank_environs[3]["SLURM_PROCID"] == "3"


@pytest.mark.parametrize(
    ("num_ranks", "hosts", "changes", "complaint"),
    [
        (9, "", {}, r"Slurm gave this job 8 tasks on 3 nodes \(4,2\(x2\)\): 8 slots; -np 9 is more"),
        (4, "", {"SLURM_TASKS_PER_NODE": ""}, "3 tasks on 3 nodes: 3 slots; -np 4 is more.*--ntasks-per-node"),
        (2, "n08:1,m7:1", {}, "m7: not among the nodes of Slurm job 17, n08, n09, n10"),
        (3, "n08:1,n09:1", {}, "the hosts have 2 slots, and 3 processes"),
        (2, "", {"SLURM_JOB_ID": ""}, "this process is in no job of Slurm's"),
        (8, "", {"PATH": "/nowhere"}, "there is no srun in PATH"),
    ],
)
def test_plans_that_cannot_be(path, num_ranks, hosts, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        plan(num_ranks, BATCH | path | changes, hosts)


def test_without_other_nodes_no_srun_is_needed():
    assert [each.host for each in plan(4, {**BATCH, "PATH": "/nowhere"}).assignments] == ["n08"]


# ---------------------------------------------------------------------------------------------- srun


def test_the_command_line_of_srun_begins_without_what_bends_it():
    line = srun_command(
        find_allocation(BATCH), BATCH | {"SBATCH_EXPORT": "NONE", "PMI_FD": "3", "HOME": "/root"}, "n09"
    )
    unset = {line[index + 1] for index, word in enumerate(line) if word == "-u"}
    assert unset == BATCH.keys() - {"SLURM_JOB_ID", "SLURM_CONF"} | {"SBATCH_EXPORT", "PMI_FD"}
    options = line[line.index("srun") + 1 :]
    assert options[-2:] == ["-w", "n09"]
    assert {"--overlap", "-N1", "-n1", "--mpi=none", "--cpu-bind=none"} <= {*options}
    assert not any(word.startswith(("-c", "--cpus-per-task", "--exact")) for word in options[:-2])


def test_a_shell_for_rsync_takes_words_as_ssh_does(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "$1" != -w ]; do shift; done\necho "on $2"; shift 2; exec "$@"\n')
    srun.chmod(0o700)
    shell = remote_shell(find_allocation(BATCH), BATCH)
    done = subprocess.run(
        [*shell, "n09", "mkdir -p 'a b' && echo", "one", "two"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "on n09\none two\n"
    assert (tmp_path / "a b").is_dir()
    assert shlex.split(rsync_command("n09", "x", shell)[4]) == list(shell)


@pytest.mark.parametrize(
    ("code", "output", "what"),
    [
        (
            1,
            "srun: error: Unable to create step for job 3: Required node not available (down, drained or reserved)",
            "Slurm does not use it: it is down or drained (srun: error: Unable to create step",
        ),
        (
            1,
            (
                "srun: error: Task launch for StepId=1.9 failed on node h3: Communication connection failure\n"
                "srun: error: Application launch failed: Communication connection failure"
            ),
            "its slurmd does not answer (srun: error: Task launch for StepId=1.9 failed on node h3",
        ),
        (1, "srun: error: Unable to confirm allocation for job 3: Invalid job id specified", "the job has ended"),
        (1, "srun: error: Unable to create step for job 3: Step limit reached for this job", "as many steps as it may"),
        (1, "srun: error: something new", "srun failed: srun: error: something new"),
        (
            137,
            "slurmstepd-h3: error: *** STEP 1.3 ON h3 CANCELLED AT 2026-11-23T16:22:56 DUE TO TIME LIMIT ***",
            "Slurm has ended it: the job's time is over (slurmstepd-h3: error: *** STEP 1.3",
        ),
        (
            1,
            "srun: error: Node failure on h3\nslurmstepd: error: *** STEP 1.3 ON h3 CANCELLED AT 1 DUE TO NODE FAILURE",
            "Slurm has ended it: the node has failed",
        ),
        (2, "slurmstepd: error: execve(): /opt/python: No such file or directory", "there is no /opt/python"),
        (
            127,
            "/usr/bin/env: /opt/python: No such file or directory\nsrun: error: h2: task 0: Exited with exit code 127",
            "there is no /opt/python (/usr/bin/env: /opt/python: No such file or directory)",
        ),
        (
            1,
            (
                "srun: cluster configuration lacks support for cpu binding\n/opt/python: No module named reigen\n"
                "srun: error: h2: task 0: Exited with exit code 1"
            ),
            "Reigen is not installed there (/opt/python: No module named reigen)",
        ),
        (3, "boom\nsrun: error: h2: task 0: Exited with exit code 3", "the agent ended with exit code 3: boom"),
    ],
)
def test_what_a_failure_means(path, code, output, what):
    options = LaunchOptions(("true",), 8, ssh=SshOptions(python="/opt/python"))
    problem = SlurmLauncher(options, BATCH | path).explain_exit("n09", code, output)
    assert problem.host == "n09"
    assert what in problem.what


@pytest.mark.parametrize(
    ("output", "changes", "words"),
    [
        ("*** STEP 1.0 ON n09 CANCELLED AT 1 DUE TO PREEMPTION ***", {}, "by Slurm: the job is preempted by another"),
        ("", {"SLURM_JOB_END_TIME": "1"}, "by Slurm: the job's time is nearly over"),
        ("", {}, "by Slurm: the job is cancelled or preempted, or its time is nearly over"),
    ],
)
def test_what_a_signal_means(path, output, changes, words):
    assert plan(8, BATCH | path | changes).describe_notice(output) == words


def test_a_message_of_an_agent_ends_as_a_line_does():
    assert LINE_END.endswith(b"\n")


# ---------------------------------------------------------------------------------------------- commands


@pytest.fixture
def in_job(monkeypatch, path):
    """This process is in a job of Slurm's."""
    for name in [*os.environ]:
        if name.startswith(("REIGEN_", "SLURM")):
            monkeypatch.delenv(name)
    for name, text in (BATCH | path).items():
        monkeypatch.setenv(name, text)
    return monkeypatch


def findings():
    return {each.name: each for each in check.collect_results(os.environ) if each.topic == "launcher"}


def test_check_says_what_reigen_run_would_do(in_job):
    found = findings()
    assert found["engine"].value == "Slurm job 17 (SLURM_JOB_ID) with 8 tasks on 3 nodes (4,2(x2))"
    assert found["reigen run"].value == "8 ranks on n08:4,n09:2,n10:2, by --launcher slurm"
    in_job.setenv("PATH", "/nowhere")
    assert findings()["reigen run"].is_problem
    assert "there is no srun in PATH" in findings()["reigen run"].value


def test_check_in_a_rank_of_srun(in_job):
    in_job.setenv("SLURM_STEP_ID", "0")
    in_job.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert "srun has started `reigen run` 2 times" in findings()["reigen run"].value
    assert not findings()["reigen run"].is_problem


def test_check_outside_of_any_engine(in_job):
    in_job.delenv("SLURM_JOB_ID")
    assert findings()["engine"].value.startswith("none: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-np", "9", "true"], "-np 9 is more"),
        (["-np", "2", "--launcher", "slurm", "-H", "n08:1,m7:1", "true"], "m7: not among the nodes"),
        (["-H", "n08:1,n09:1", "--launcher", "slurm", "true"], "the following arguments are required: -np"),
    ],
)
def test_reigen_run_in_a_job(in_job, capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        main.main(["run", *arguments])
    assert complaint in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- one step for many nodes

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "1",
    "PWD": "/shared",
}


def nothing(path: str) -> None:
    return None


def test_one_srun_for_many_nodes() -> None:
    command = step_command({"SLURM_LABELIO": "1", "SLURM_JOB_ID": "7"}, ["n1", "n2"], 1)
    assert command[:4] == ["env", "-u", "SLURM_LABELIO", "srun"]
    assert command[-9:] == [
        *("-N", "2", "-n", "2", "--ntasks-per-node=1", "--input=all", "--label", "--het-group=1", "-w"), "n1,n2",
    ][-9:]  # fmt: skip
    assert "-N1" not in command


def test_a_task_of_a_step_knows_its_node() -> None:
    job = find_step(STEP, nothing)
    assert job is not None
    assert (job.index, job.size, job.leader, job.names) == (1, 3, "n1", ("n1", "n2", "n3"))
    assert (job.job_id, job.secret_file, job.makes_secret) == ("7.2.0", "/shared/.reigen-slurm-7.2.0", True)
    assert {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(job.removed)
    again = find_step(STEP | {"SLURM_RESTART_COUNT": "1"}, nothing)
    assert again is not None
    assert again.secret_file != job.secret_file
    assert find_step({name: text for name, text in STEP.items() if name != "SLURM_STEP_ID"}, nothing) is None


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"SLURM_STEP_NUM_TASKS": "6"}, "has 6 tasks on 3 nodes"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "not a number"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is 3"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "at position 1"),
    ],
)
def test_steps_that_cannot_be(more: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        find_step(STEP | more, nothing)


@pytest.mark.parametrize(
    ("workers", "servers", "expected"),
    [(2, 1, ("ab", "c")), (1, None, ("a", "bc")), (None, 1, ("ab", "c")), (1, 1, ("a", "b"))],
)
def test_nodes_of_workers_and_of_servers(workers: int | None, servers: int | None, expected: tuple[str, str]) -> None:
    allocation = find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"})
    assert allocation is not None
    nodes, names = divide_nodes(allocation, workers, servers)
    assert ("".join(node.name for node in nodes), "".join(names)) == expected


@pytest.mark.parametrize(("workers", "servers"), [(3, None), (2, 2), (0, 1), (None, 3), (4, 1)])
def test_nodes_that_are_not_enough(workers: int | None, servers: int | None) -> None:
    allocation = find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b,c"})
    assert allocation is not None
    with pytest.raises(ConfigError, match="nodes"):
        divide_nodes(allocation, workers, servers)


def test_a_task_of_an_array_is_named() -> None:
    variables = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "17"}
    allocation = find_allocation({"SLURM_JOB_ID": "20", "SLURM_JOB_NODELIST": "a", **variables})
    assert allocation is not None
    assert allocation.description.endswith("task 3 of array 17")


def test_gpus_are_divided_among_the_ranks_of_a_host() -> None:
    listed = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d", "ROCR_VISIBLE_DEVICES": "3,2,1,0"}
    assert divide_gpus(listed, 2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "ROCR_VISIBLE_DEVICES": "3,2"},
        {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d", "ROCR_VISIBLE_DEVICES": "1,0"},
    ]
    assert divide_gpus({}, 2, 1) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    with pytest.raises(ConfigError, match="2 ranks with 1 GPUs each need 2, but CUDA_VISIBLE_DEVICES=5 lists 1"):
        divide_gpus({"CUDA_VISIBLE_DEVICES": "5"}, 2, 1)


# ---------------------------------------------------------------------------------------------- one step for all nodes


class StepCaller:
    """The supervisor, as a starter sees it."""

    def __init__(self, loop: LauncherLoop) -> None:
        self.loop = loop
        self.ended: dict[str, HostProblem] = {}
        self.said: dict[str, list[str]] = {}

    def exclude_child(self, pid: int) -> None:
        pass

    def agent_ended(self, host: str, problem: HostProblem) -> None:
        self.ended.setdefault(host, problem)

    def agent_printed(self, host: str, line: str) -> None:
        self.said.setdefault(host, []).append(line)


@pytest.fixture
def call_step(tmp_path, monkeypatch):
    """Starts a step on n09 and n10 by an srun that runs these lines; waits until so many agents have ended."""

    def call(script: str, num_ended: int) -> StepCaller:
        (tmp_path / "srun").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "srun").chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        options = LaunchOptions(("true",), 8)
        environ = {**BATCH, "PATH": os.environ["PATH"], "REIGEN_SLURM_STEPS": "1"}
        starter = SlurmLauncher(options, environ).allocate(lambda seconds: None).agents
        assert isinstance(starter, SlurmStepStarter)
        with LauncherLoop() as loop:
            caller = StepCaller(loop)
            starter.start_agents([DialCall(name, "{}") for name in ("n09", "n10")], AgentCommand("/no/python"), caller)
            deadline = time.monotonic() + 60
            while len(caller.ended) < num_ended:
                assert time.monotonic() < deadline, caller.said
                loop.wait(0.1)
            starter.close_agents()
            return caller

    return call


def test_a_node_whose_task_ends_is_named_while_the_step_goes_on(call_step):
    caller = call_step(
        "echo '1: slurmstepd-n10: error: execve(): /no/python: No such file or directory' >&2\n"
        "echo 'srun: error: n10: task 1: Exited with exit code 2' >&2\n"
        "exec cat >/dev/null",
        1,
    )
    assert list(caller.ended) == ["n10"]
    assert re.fullmatch(r"there is no .*python \(.*execve\(\): /no/python: No such.*\)", caller.ended["n10"].what)
    assert list(caller.said) == ["n10"]


def test_a_node_that_a_step_cannot_start_on_is_named_alone(call_step):
    what = "srun: error: Task launch for StepId=1.0 failed on node n10: Communication connection failure"
    caller = call_step(
        f"echo '{what}' >&2; echo 'srun: error: Application launch failed: Communication connection failure' >&2\n"
        "echo '0: slurmstepd-n09: error: *** STEP 1.0 ON n09 CANCELLED AT 2026-01-01T00:00:00 ***' >&2\n"
        "echo 'srun: error: n09: task 0: Exited with exit code 1' >&2; exit 1",
        2,
    )
    assert caller.ended["n10"] == HostProblem("n10", f"its slurmd does not answer ({what})", "see sinfo -R")
    assert caller.ended["n09"].what == "srun has ended the step of all nodes because of n10"


def test_nodes_in_ranges_are_told_apart_by_srun(call_step):
    caller = call_step(
        "echo 'srun: error: n[09-10]: tasks 0-1: Exited with exit code 5' >&2\n"
        "echo '0: first' >&2; echo '1: second' >&2; exec cat >/dev/null",
        2,
    )
    assert [each.what for each in caller.ended.values()] == [
        "the agent ended with exit code 5: first",
        "the agent ended with exit code 5: second",
    ]


def test_words_of_srun_about_no_node_are_kept_for_all(call_step):
    words = "srun: Job 17 step creation temporarily disabled, retrying (Requested nodes are busy)"
    caller = call_step(f"printf '%s' '{words}' >&2; exit 1", 2)
    assert caller.said == {"n09": [words], "n10": [words]}


def test_an_agent_that_does_not_come_is_shown_with_the_words_of_its_engine():
    with LauncherLoop() as loop:
        client = AgentClient("n10", DialedLine(loop), Mock(), 5.0)
        client.add_output("srun: step creation temporarily disabled, retrying")
        problem = client.problem(Mock(), 30.0)
        client.close()
    assert problem.what == "it has not answered within 30 s (srun: step creation temporarily disabled, retrying)"
