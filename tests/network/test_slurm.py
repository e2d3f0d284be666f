"""`reigen run` in jobs of a real Slurm: three nodes, which are stand-in machines."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from reigen.launch.slurm.node_list import expand_node_list
from reigen.testing import check_launcher
from tests.conformance.launcher_cases import SAME_FOR_ALL_AGENTS
from tests.elastic.engine_training import Training
from tests.lab import Hosts, Unavailable
from tests.lab.support import with_full_disk
from tests.network.slurm import Slurm, why_no_slurm
from tests.network.waiting import wait_for
from tests.unit.launch.test_slurm import number_list

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "reigen", "run")
#: Says which signals it gets; SIGTERM ends it, in good order.
HEARING = """
import os, signal, sys, time
def hear(signum, frame):
    os.write(1, f"heard {signal.Signals(signum).name}\\n".encode())
    if signum == signal.SIGTERM:
        sys.exit(0)
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, hear)
os.write(1, f"ready {os.environ.get('SLURM_RESTART_COUNT', '0')}\\n".encode())
while True:
    time.sleep(0.1)
"""
#: What srun would obey, if it saw it.
BENDING = {
    "SLURM_LABELIO": "1",
    "SLURM_STDOUTMODE": "none",
    "SLURM_UNBUFFEREDIO": "1",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_KILL_BAD_EXIT": "1",
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_RANK": "0",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3, shared=[directory]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield Slurm(hosts, directory)


def in_job(slurm: Slurm, allocation: dict[str, str], *arguments: str, **more: str) -> tuple[int, str, str]:
    """`reigen run` on the first node of an allocation."""
    return slurm.run(*RUN, *arguments, env={**allocation, **path_of_this_source(), **more}, timeout=90.0)


def path_of_this_source() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def batch(slurm: Slurm, name: str, *options: str, lines: Sequence[str] = ()) -> Iterator[tuple[str, Path]]:
    """A batch job of these lines, or one that runs HEARING; its number and its output."""
    program, script, output = (slurm.directory / f"{name}.{suffix}" for suffix in ("hear.py", "sh", "out"))
    program.write_text(HEARING)
    lines = lines or (f"exec {' '.join(RUN)} --verbose {sys.executable} -S {program}",)
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    arguments = ("--parsable", "--open-mode=append", "-o", str(output), *options, str(script))
    code, out, err = slurm.run("sbatch", *arguments, env=path_of_this_source())
    assert code == 0, err
    try:
        yield out.strip(), output
    finally:
        slurm.run("scancel", out.strip())
        wait_for(lambda: slurm.num_idle() == 3, "the nodes to be idle again")


def commands(slurm: Slurm) -> list[str]:
    return [command for host in slurm.hosts for command in host.processes().values()]


def steps(slurm: Slurm, allocation: dict[str, str]) -> list[str]:
    return slurm.run("squeue", "-h", "-s", "-j", allocation["SLURM_JOB_ID"], "-o", "%i")[1].split()


def recorded(slurm: Slurm) -> str:
    """What Slurm shows to everybody."""
    shown = [slurm.run("scontrol", "-d", "show", what)[1] for what in ("job", "step")]
    assert all("StepId=" in text or "JobId=" in text for text in shown), shown
    return "".join(shown)


def count(output: Path, text: str) -> int:
    return output.read_text().count(text) if output.exists() else 0


@pytest.mark.timeout(600)
def test_the_conformance_suite(slurm: Slurm) -> None:
    with slurm.allocation("-N3", "-n5") as allocation:
        outcome = check_launcher(
            "slurm",
            "h1:1,h2:2,h3:2",
            leave_out=SAME_FOR_ALL_AGENTS,
            prefix=(*slurm.hosts[0].entry(SOURCE), *with_full_disk("/media")),
            environ=allocation,
            records=lambda: recorded(slurm),
            is_empty=lambda: not steps(slurm, allocation),
            cancel_job=lambda: cancel_steps(slurm, allocation),
            kill_host=lambda name: slurm.hosts[2].cut(),
            directory=str(slurm.directory),
            full_directory="/media",
        )
        slurm.hosts[2].join()
    assert {case: result for case, result in outcome.items() if result != "passed"} == SAME_FOR_ALL_AGENTS


def cancel_steps(slurm: Slurm, allocation: dict[str, str]) -> bool:
    """What users do who cancel a job of `reigen run`, and keep the allocation."""
    found = [step for step in steps(slurm, allocation) if not step.endswith(".extern")]
    if found:
        slurm.run("scancel", *found)
    return bool(found)


def test_node_lists_are_expanded_as_by_slurm(slurm: Slurm) -> None:
    generator = random.Random(7)
    lists = []
    for _ in range(200):
        words = [generator.choice(["n", "rack-", "gpu.", "x9y"]) + number_list(generator)[0] for _ in range(2)]
        lists.append(generator.choice([",".join, "".join])(words))
    script = "; ".join(f"scontrol show hostnames '{text}'; echo" for text in lists)
    code, out, err = slurm.run("sh", "-c", script)
    assert code == 0, err
    assert [block.split() for block in out.split("\n\n")[:-1]] == [expand_node_list(text) for text in lists]


def test_the_job_says_what_runs_where(slurm: Slurm) -> None:
    names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURMD_NODENAME", "SLURM_STEP_ID"]
    program = slurm.directory / "places.py"
    program.write_text(f"import os\nprint(*[os.environ.get(name) for name in {names}])\n")
    bending = "".join(f"export {name}={text}\n" for name, text in BENDING.items())
    lines = (
        f"{bending}{' '.join(RUN)} --no-prefix {sys.executable} -S {program}",
        "echo ended $?",
    )
    with batch(slurm, "places", "-N3", "-n7", lines=lines) as (_, output):
        wait_for(lambda: count(output, "ended"), "the job ends")
    printed = output.read_text().splitlines()
    places = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)]
    expected = [f"{rank} {local} {node} 7 h{node + 1} None" for rank, (node, local) in enumerate(places)]
    assert (sorted(printed[:-1]), printed[-1]) == (expected, "ended 0")


def test_components_of_a_heterogeneous_job_are_one_job(slurm: Slurm) -> None:
    lines = (f"{' '.join(RUN)} hostname", "echo ended $?")
    with batch(slurm, "components", "-N1", "-n1", ":", "-N2", "-n3", lines=lines) as (_, output):
        wait_for(lambda: count(output, "ended"), "the job ends")
    *printed, end = output.read_text().splitlines()
    assert (sorted(printed), end) == (["[0] h1", "[1] h2", "[2] h2", "[3] h3"], "ended 0")


def test_orders_that_cannot_be(slurm: Slurm) -> None:
    with slurm.allocation("-N3", "-n3") as allocation:
        status, _, err = in_job(slurm, allocation, "-np", "4", "true")
        assert (status, "Slurm gave this job 3 tasks on 3 nodes" in err) == (2, True), err
        status, _, err = in_job(slurm, allocation, "-np", "1", "--launcher", "slurm", "-H", "h4:1", "true")
        assert (status, "h4: not among the nodes of Slurm job" in err) == (2, True), err
        several = slurm.run("srun", "-N2", "-n2", *RUN, "true", env={**allocation, **path_of_this_source()})
        assert several[0] != 0
        assert several[2].count("srun has started `reigen run` 2 times") == 2, several[2]
        # nor is there a hang where a job has ended
        slurm.run("scancel", allocation["SLURM_JOB_ID"])
        status, _, err = in_job(slurm, allocation, "hostname")
        assert (status, err.count("the job has ended")) == (1, 2), err


def test_functions_and_collectives_run_on_the_nodes_of_the_job(slurm: Slurm) -> None:
    program = slurm.directory / "functions.py"
    program.write_text(
        "import socket, numpy, reigen\n"
        "def work():\n"
        "    reigen.init()\n"
        "    return socket.gethostname(), float(reigen.allreduce(numpy.ones(3), op=reigen.Sum)[0])\n"
        "if __name__ == '__main__':\n"
        "    print(reigen.run(work, num_proc=5))\n"
    )
    with slurm.allocation("-N3", "-n5") as allocation:
        environ = {**allocation, **path_of_this_source(), "SLURM_TASKS_PER_NODE": "3,1(x2)"}
        status, out, err = slurm.run(sys.executable, str(program), env=environ)
    assert (status, out) == (0, f"{[(host, 5.0) for host in ('h1', 'h1', 'h1', 'h2', 'h3')]}\n"), err


def test_a_directory_is_copied_to_nodes_that_do_not_share_it(slurm: Slurm) -> None:
    with slurm.allocation("-N2", "-n2") as allocation:
        command = f"{' '.join(RUN)} --sync-dst-dir /root/copy cat file"
        shell = f"mkdir /root/mine; cd /root/mine; echo text >file; exec {command}"
        status, out, err = slurm.run("sh", "-c", shell, env={**allocation, **path_of_this_source()})
    assert (status, sorted(out.splitlines())) == (0, ["[0] text", "[1] text"]), err


def test_a_signal_of_slurms_reaches_every_rank_and_a_cancelled_job_ends_in_good_order(slurm: Slurm) -> None:
    with batch(slurm, "cancelled", "-N3", "-n3") as (job, output):
        wait_for(lambda: count(output, "ready") == 3, "ranks are ready")
        slurm.run("scancel", "--signal=USR1", job)
        wait_for(lambda: all(count(output, f"[{rank}] heard SIGUSR1") for rank in range(3)), "all ranks to hear of it")
        assert count(output, "reigen run: SIGUSR1 is passed on to the ranks") == 1
        slurm.run("scancel", job)
        wait_for(lambda: count(output, "stopped by SIGTERM"), "the job ends")
        assert all(count(output, f"[{rank}] heard SIGTERM") for rank in range(3))
    wait_for(
        lambda: not [each for each in commands(slurm) if "-m reigen" in each or "hear.py" in each], "nothing is left"
    )


def test_a_job_in_the_queue_again_says_so(slurm: Slurm) -> None:
    with batch(slurm, "again", "-N2", "-n2", "--requeue") as (job, output):
        wait_for(lambda: count(output, "ready 0") == 2, "ranks are ready")
        slurm.run("scontrol", "requeue", job)
        wait_for(lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T")[1].strip() == "PENDING", "it is in the queue")
        # Slurm would wait two minutes. In the second of its end no node takes it again: its credential is revoked.
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        wait_for(lambda: count(output, "ready 1") == 2, "ranks are ready again")
        assert count(output, "with 2 tasks on 2 nodes (1(x2)), started again 1 time") == 1


def test_many_nodes_are_reached_by_one_step_whose_agents_dial_back(slurm: Slurm) -> None:
    program = slurm.directory / "sum.py"
    program.write_text(
        "import os, numpy, reigen\n"
        "reigen.init()\n"
        "total = reigen.allreduce(numpy.ones(2), op=reigen.Sum)\n"
        "print(reigen.rank(), os.environ['SLURM_PROCID'], total[0])\n"
    )
    with slurm.allocation("-N3", "-n5") as allocation:
        allocation |= {"SLURM_TASKS_PER_NODE": "1,2(x2)", "REIGEN_SLURM_STEPS": "1", **BENDING}
        status, out, err = in_job(slurm, allocation, "--no-prefix", sys.executable, str(program))
        assert (status, sorted(out.splitlines())) == (0, [f"{rank} {rank} 5.0" for rank in range(5)]), err
        status, _, err = in_job(slurm, allocation, "--remote-python", "/no/python", "true")
        assert (status, len(re.findall(r"\n  h[23]  there is no /no/python", err))) == (1, 2), err
        status, out, err = in_job(slurm, allocation, "sh", "-c", "test $REIGEN_RANK = 3 && exit 7; sleep 600")
        assert (status, "rank 3 (host h3) failed first: exit code 7" in err) == (7, True), err


def test_steps_with_a_task_on_each_node_start_themselves(slurm: Slurm) -> None:
    nodes = f"cd {slurm.directory}; exec srun -N3 --ntasks-per-node=1"
    run = f"{' '.join(RUN)} --nodes-from-env"
    with slurm.allocation("-N3", "-n3") as allocation:
        environ = {**allocation, **path_of_this_source()}
        command = f"{nodes} {run} -np 6 sh -c 'echo $(hostname) ${{SLURM_PROCID-none}}'"
        status, out, err = slurm.run("sh", "-c", command, env=environ)
        expected = [f"[{rank}] h{1 + rank // 2} none" for rank in range(6)]
        assert (status, sorted(out.splitlines())) == (0, expected), err
        command = f"{nodes} {run} -np 6 sh -c 'test $REIGEN_RANK = 3 && exit 7; sleep 600'"
        status, _, err = slurm.run("sh", "-c", command, env=environ)
        assert (status, "rank 3 (host h2) failed first: exit code 7" in err) == (7, True), err
        assert not [path.name for path in slurm.directory.iterdir() if path.name.startswith(".reigen")]
        # the nodes do not share this directory
        command = f"cd /; exec srun -N2 --ntasks-per-node=1 {run} -np 2 true"
        status, _, err = slurm.run("sh", "-c", command, env={**environ, "REIGEN_START_TIMEOUT": "3"})
        assert (status, "is / shared by the nodes?" in err) == (1, True), err


def test_workers_and_servers_have_nodes_of_their_own(slurm: Slurm) -> None:
    launch = (sys.executable, "-m", "reigen", "launch", "--launcher", "slurm", "-n", "2", "-s", "1")
    with slurm.allocation("-N3", "-n3") as allocation:
        environ = {**allocation, **path_of_this_source()}
        which = ("--slurm-worker-nodes", "2", "--slurm-server-nodes", "1", "--no-prefix")
        status, out, err = slurm.run(*launch, *which, "sh", "-c", "echo $DMLC_ROLE $(hostname)", env=environ)
        assert (status, sorted(out.splitlines())) == (0, ["scheduler h1", "server h3", "worker h1", "worker h2"]), err
        status, _, err = slurm.run(*launch, "--slurm-worker-nodes", "3", "true", env=environ)
        assert (status, "not enough for workers on 3 and servers on 1 others" in err) == (2, True), err


def test_a_job_that_is_told_of_its_end_is_put_back_into_the_queue(slurm: Slurm) -> None:
    program = slurm.directory / "wait.py"
    program.write_text(
        "import os, time\nprint('ready', os.environ['SLURM_RESTART_COUNT'], flush=True)\ntime.sleep(600)\n"
    )
    run = f"{' '.join(RUN)} --requeue-on-notice {sys.executable} -S {program}"
    lines = (f"export SLURM_RESTART_COUNT=${{SLURM_RESTART_COUNT:-0}}; exec {run}",)
    with batch(slurm, "requeued", "-N2", "-n2", "--requeue", lines=lines) as (job, output):
        wait_for(lambda: count(output, "ready 0") == 2, "ranks are ready")
        slurm.run("scancel", "--batch", "--signal=TERM", job)
        wait_for(lambda: slurm.run("squeue", "-h", "-j", job, "-o", "%T")[1].strip() == "PENDING", "it is in the queue")
        # Slurm would wait two minutes. In the second of its end no node takes it again: its credential is revoked.
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        wait_for(lambda: count(output, "ready 1") == 2, "ranks are ready again")
        slurm.run("scancel", job)
        wait_for(lambda: count(output, "is not put back"), "a job that was cancelled stays so")


def test_ranks_that_mpirun_starts_in_a_batch_job(slurm: Slurm) -> None:
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("not installed: mpirun.openmpi (openmpi-bin of Debian)")
    program = slurm.directory / "mpi.py"
    program.write_text(
        "import os, socket, numpy, reigen\n"
        "reigen.init()\n"
        "total = reigen.allreduce(numpy.ones(2), op=reigen.Sum)\n"
        "os.write(1, f'{reigen.rank()} of {reigen.size()} on {socket.gethostname()}: {total[0]}\\n'.encode())\n"
    )
    options = "--allow-run-as-root --bind-to none --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0"
    lines = (
        f"export REIGEN_SECRET={'ab' * 32}",
        f"{mpirun} {options} -x PYTHONPATH -x REIGEN_SECRET {sys.executable} {program}",
        "echo ended $?",
    )
    with batch(slurm, "mpi", "-N3", "-n4", lines=lines) as (_, output):
        wait_for(lambda: count(output, "ended"), "the job ends")
        assert count(output, "ended 0"), output.read_text()
        assert [count(output, f"{rank} of 4 on h") for rank in range(4)] == [1] * 4
        assert count(output, ": 4.0") == 4


def test_a_step_that_is_cancelled_is_a_lost_host(slurm: Slurm) -> None:
    with slurm.allocation("-N2", "-n2") as allocation:
        environ = {**allocation, **path_of_this_source()}
        with closing(slurm.start(*RUN, sys.executable, "-Sc", HEARING, env=environ)) as job:
            wait_for(lambda: job.output()[0].count("ready") == 2, "ranks are ready")
            slurm.run("scancel", steps(slurm, allocation)[0])
            assert job.wait() != 0
            err = job.output()[1]
    assert re.search(r"host h2 was (lost|sent SIGTERM).*Slurm.*: the job, or this step of it, was cancelled", err), err


#: What is killed in the middle of a job, by how its command begins ("": a step is cancelled), and how.
ENDS = [(words, signal.SIGKILL) for words in ("-S ", "-P -m reigen.launch.agent", "srun --", "-m reigen run")]
ENDS += [(words, signal.SIGTERM) for words in ("-P -m reigen.launch.agent", "srun --", "-m reigen run", "")]
ENDS += [("-m reigen run", signal.SIGINT)]


def left_of_jobs(slurm: Slurm, job_id: str) -> list[str]:
    """What of jobs, and not of the cluster, is left on any node and in Slurm's records."""
    words = ("hear.py", "reigen.launch", "-m reigen", "srun", "slurmstepd: ")
    running = [command for command in commands(slurm) if any(word in command for word in words)]
    steps = slurm.run("squeue", "-h", "-s", "-j", job_id, "-o", "%i")[1].split()
    return running + [step for step in steps if not step.endswith((".extern", ".batch"))]


def first_pids(slurm: Slurm, words: str) -> list[int]:
    """Processes of commands that begin so; the first of those with the same command: srun has a helper that may die."""
    firsts: dict[tuple[str, str], int] = {}
    for host in slurm.hosts:
        for pid, command in sorted(host.processes().items()):
            if command.removeprefix(f"{sys.executable} ").startswith(words):
                firsts.setdefault((host.name, command), pid)
    assert firsts, f"no process {words}"
    return list(firsts.values())


@pytest.mark.timeout(3000)
def test_nothing_is_left_after_any_end(slurm: Slurm) -> None:
    """REIGEN_TEST_ENDS=100 for more than there is time for in every run."""
    chances = random.Random(int(os.environ.get("REIGEN_TEST_SEED", "19")))
    program = slurm.directory / "hear.py"
    program.write_text(HEARING)
    with slurm.allocation("-N3", "-n3") as allocation:
        environ, job_id = {**allocation, **path_of_this_source()}, allocation["SLURM_JOB_ID"]
        for number in range(int(os.environ.get("REIGEN_TEST_ENDS", "3"))):
            words, signum = chances.choice(ENDS)
            end = f"end {number}: {signum.name} for {words or 'a step'}"
            with closing(slurm.start(*RUN, sys.executable, "-S", str(program), env=environ)) as job:
                wait_for(lambda job=job: job.output()[0].count("ready") == 3, f"{end}: ranks are ready")
                if words:
                    os.kill(chances.choice(first_pids(slurm, words)), signum)
                else:
                    steps = slurm.run("squeue", "-h", "-s", "-j", job_id, "-o", "%i")[1].split()
                    slurm.run("scancel", chances.choice([step for step in steps if not step.endswith(".extern")]))
                assert job.wait() != 0, end
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not left_of_jobs(slurm, job_id), end, 15.0)
            assert left_of_jobs(slurm, job_id) == [], end


def test_an_elastic_job_goes_on_when_ranks_agents_and_nodes_go(slurm: Slurm) -> None:
    directory = slurm.directory / "elastic"
    directory.mkdir()
    training = Training(directory)
    program = f"from tests.elastic.engine_training import train_until; train_until({str(directory)!r})"
    options = ("--min-np", "2", "--blacklist-cooldown-range", "1", "1", "--verbose")
    with slurm.allocation("-N3", "-n6", "--no-kill") as allocation:
        environ = {**allocation, **path_of_this_source(), "SLURM_TASKS_PER_NODE": "2(x3)", "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] += f":{SOURCE}"
        with closing(slurm.start(*RUN, *options, sys.executable, "-c", program, env=environ)) as job:
            try:
                first = training.wait_for_size(6)
                assert {step.host for step in first} == {"h1", "h2", "h3"}
                os.kill(rank_of(slurm, first[3].slot), signal.SIGKILL)
                training.wait_for_size(6, is_so=lambda steps: first[3].process not in {each.process for each in steps})
                agents = slurm.hosts[2].processes().items()
                os.kill(next(pid for pid, command in agents if "reigen.launch.agent" in command), signal.SIGKILL)
                third = training.wait_for_size(
                    6, is_so=lambda steps: first[5].process not in {each.process for each in steps}
                )
                assert [each.process for each in third[:3]] == [each.process for each in first[:3]]
                # the job gives a node back, and another one's slurmd, steps and all die
                job_id = allocation["SLURM_JOB_ID"]
                code, _, err = slurm.run("scontrol", "update", f"JobId={job_id}", "NodeList=h1,h2")
                assert code == 0, err
                training.wait_for_size(4)
                slurm.hosts[1].cut()
                fifth = training.wait_for_size(2)
                assert fifth[0].process == first[0].process
                training.end()
                assert job.wait() == 0
            except BaseException:
                print(job.output()[1][-5000:])
                raise
            finally:
                slurm.hosts[1].join()
            assert "host h3 cannot take part: " in job.output()[1]
    training.check()


def rank_of(slurm: Slurm, slot: int) -> int:
    """The process of a place of an elastic job."""
    (found,) = (
        pid
        for host in slurm.hosts
        for pid, command in host.processes().items()
        if command.startswith(f"{sys.executable} -c")
        and f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return found


def test_nodes_that_do_not_answer(slurm: Slurm) -> None:
    with slurm.allocation("-N3", "-n3") as allocation:
        environ = {**allocation, **path_of_this_source(), "REIGEN_PEER_TIMEOUT": "3"}
        with closing(slurm.start(*RUN, sys.executable, "-Sc", HEARING, env=environ)) as job:
            wait_for(lambda: job.output()[0].count("ready") == 3, "ranks are ready")
            slurm.hosts[2].cut()
            assert job.wait() == 255
            assert "host h3 was lost, with rank 2: nothing has been heard of it for" in job.output()[1]
        slurm.hosts[2].join()
        slurm.stop_daemon(slurm.hosts[2])
        status, out, err = in_job(slurm, allocation, "hostname")
        assert (status, out) == (1, ""), err
        assert re.search(
            r"1 of 2 other hosts cannot take part; nothing was started\n  h3  its slurmd does not answer", err
        )
