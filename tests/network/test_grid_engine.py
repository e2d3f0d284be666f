"""`reigen run` and `reigen launch` in jobs of a real Grid Engine: three hosts, which are stand-in machines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from reigen.testing import check_launcher
from reigen.testing.launchers import _CASES
from tests.conformance.launcher_cases import SAME_FOR_ALL_AGENTS
from tests.elastic.engine_training import Training
from tests.lab import Host, Hosts, Unavailable
from tests.lab.support import with_full_disk
from tests.network.grid_engine import GridEngine, why_no_grid_engine
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
REIGEN = (sys.executable, "-m", "reigen")
RUN = (*REIGEN, "run")
#: Says which signals it gets, and goes on.
HEARING = """
import os, signal, time
def hear(signum, frame):
    os.write(1, f"heard {signal.Signals(signum).name}\\n".encode())
for signum in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, hear)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.1)
"""
#: Kills qrsh, too, and for that an execution daemon kills the job: it needs one of its own.
DEADLY = "killed_supervisor"
EXPORT = f"export PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    if reason := why_no_grid_engine():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("sge")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3, shared=[directory]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield GridEngine(hosts, directory)


def path_of_this_source() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_in_job(host: Host, job: Mapping[str, str], *arguments: str, **more: str) -> tuple[int, str, str]:
    return run_on(host, job, *RUN, *arguments, **more)


def run_on(host: Host, job: Mapping[str, str], *command: str, **more: str) -> tuple[int, str, str]:
    """Runs a command on a host, with the variables of a job: exit code, stdout, stderr."""
    with closing(host.start(command, env={**job, **path_of_this_source(), **more})) as process:
        return process.wait(90.0), *process.output()


def commands(engine: GridEngine) -> list[str]:
    return [command for host in engine.hosts for command in host.processes().values()]


def count(output: Path, text: str) -> int:
    return output.read_text().count(text) if output.exists() else 0


def hosts_of(engine: GridEngine) -> list[tuple[str, int]]:
    lines = (engine.directory / "hosts").read_text().splitlines()
    return [(words[0], int(words[1])) for words in map(str.split, lines)]


def listed_hosts(engine: GridEngine) -> str:
    return ",".join(f"{name}:{slots}" for name, slots in hosts_of(engine))


@pytest.mark.timeout(600)
def test_the_conformance_suite(engine: GridEngine) -> None:
    with engine.allocation("-pe", "dealing", "5") as (host, job):
        leave_out = {
            DEADLY: "it takes the whole job with it: see test_a_supervisor_that_is_killed_ends_the_job",
            "cancelled_job": "there is nothing less than the job: see test_a_deleted_job_is_gone",
            **SAME_FOR_ALL_AGENTS,
        }
        listed = listed_hosts(engine)
        last = next(each for each in engine.hosts if each.name == listed.rpartition(",")[2].partition(":")[0])
        outcome = check_launcher(
            "sge",
            listed,
            prefix=(*host.entry(SOURCE), *with_full_disk("/media")),
            environ=job,
            leave_out=leave_out,
            kill_host=lambda name: last.cut(),
            directory=str(engine.directory),
            full_directory="/media",
        )
        last.join()
    assert {case: result for case, result in outcome.items() if result != "passed"} == leave_out


def test_a_supervisor_that_is_killed_ends_the_job(engine: GridEngine) -> None:
    others = dict.fromkeys(_CASES.keys() - {DEADLY}, "another test has it")
    with engine.allocation("-pe", "dealing", "5") as (host, job):
        check_launcher("sge", listed_hosts(engine), prefix=host.entry(SOURCE), environ=job, leave_out=others)
        wait_for(lambda: engine.num_jobs() == 0, "the job is killed by its execution daemon")


def test_a_job_script_runs_on_its_slots_and_lives_on_when_a_rank_is_killed(engine: GridEngine) -> None:
    names = ["SGE_TASK_ID", "QRSH_COMMAND", "NSLOTS", "JOB_NAME", "REIGEN_LOCAL_RANK"]
    directory = engine.directory / "a b"
    directory.mkdir()
    program = directory / "the places.py"
    program.write_text(
        "import os, socket\n"
        "has_own = os.path.isdir(os.environ['TMP'])\n"
        f"print(socket.gethostname(), os.getcwd(), has_own, *map(os.environ.get, {names}))\n"
    )
    killed = directory / "killed.py"
    killed.write_text(
        "import os, time\nos.environ['REIGEN_RANK'] == '4' and os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    )
    lines = (
        "#$ -V",
        "#$ -cwd",
        "#$ -pe dealing 5",
        EXPORT,
        f"{' '.join(RUN)} --no-prefix {sys.executable} -S 'the places.py'",
        f"{' '.join(RUN)} {sys.executable} -S killed.py",
        "echo killed $?",
        f"{' '.join(RUN)} no-such-program",
        "echo missing $?",
        f"{' '.join(RUN)} -np 2 --verbose hostname",
        f"{' '.join(REIGEN)} check | grep '^ *launcher'",
        "echo the script ends $?",
    )
    _, output = engine.submit("places", lines, cwd=directory)
    wait_for(lambda: count(output, "the script ends"), "the job ends")
    text = output.read_text()
    printed = text.splitlines()
    places = [line.split(" ") for line in printed if "/a b " in line]
    assert len(places) == 5, text
    assert {tuple(place[1:]) for place in places} == {
        (*f"{directory} True None None 5 places.sh".split(" "), local) for local in "01"
    }
    assert len({place[0] for place in places}) == 3
    assert "rank 4 (host " in text, text
    assert ("killed 137" in printed, "missing 127" in printed) == (True, True), text
    assert re.search(r"launcher sge: Grid Engine job \d+ \(JOB_ID\) with 5 slots on 3 hosts", text), text
    assert re.search(r"5 ranks on h\d:2,h\d:2,h\d:1, by --launcher sge", text), text


def test_an_elastic_job_goes_on_when_ranks_die(engine: GridEngine) -> None:
    directory = engine.directory / "elastic"
    directory.mkdir()
    training = Training(directory)
    program = f"from tests.elastic.engine_training import train_until; train_until({str(directory)!r})"
    options = ("--min-np", "2", "--blacklist-cooldown-range", "1", "1")
    with engine.allocation("-pe", "dealing", "5") as (host, job):
        environ = {**job, **path_of_this_source(), "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] += f":{SOURCE}"
        with closing(host.start([*RUN, *options, sys.executable, "-c", program], env=environ)) as process:
            try:
                first = training.wait_for_size(5)
                assert len({step.host for step in first}) == 3
                for victim in (first[4], first[0]):
                    os.kill(rank_of(engine, victim.slot), signal.SIGKILL)
                    gone = victim.process
                    training.wait_for_size(
                        5, is_so=lambda steps, gone=gone: gone not in {each.process for each in steps}
                    )
            except BaseException:
                print(process.output()[1][-5000:])
                raise
            training.end()
            assert process.wait() == 0
    training.check()


def rank_of(engine: GridEngine, slot: int) -> int:
    """The process of a place of an elastic job."""
    (found,) = (
        pid
        for host in engine.hosts
        for pid, command in host.processes().items()
        if command.startswith(f"{sys.executable} -c")
        and f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return found


def test_orders_that_cannot_be(engine: GridEngine) -> None:
    with engine.allocation("-pe", "pairs", "4") as (host, job):
        status, _, err = run_in_job(host, job, "-np", "5", "true")
        assert (status, "Grid Engine gave this job 4 slots on 2 hosts" in err) == (2, True), err
        absent = next(each.name for each in engine.hosts if each.name not in dict(hosts_of(engine)))
        status, _, err = run_in_job(host, job, "-np", "1", "--launcher", "sge", "-H", f"{absent}:1", "true")
        assert (status, f"{absent}: not among the hosts of Grid Engine job" in err) == (2, True), err
        status, _, err = run_in_job(host, {**job, "PE_HOSTFILE": "/no/file"}, "true")
        assert (status, "/no/file, cannot be read: No such file" in err) == (2, True), err
        # what bends qrsh does not bend ours
        bending = {"QRSH_WRAPPER": "/bin/echo", "SGE_DEBUG_LEVEL": "2 0 0 0 0 0 0 0"}
        status, out, err = run_in_job(host, {**job, **bending}, "--no-prefix", "hostname")
        assert (status, sorted(out.split())) == (0, sorted(name for name, _ in hosts_of(engine) * 2)), err
    status, _, err = run_in_job(host, job, "hostname")
    assert status != 0
    assert re.search(r"takes no task|cannot be read", err), err


def test_a_parallel_environment_that_will_not_do(engine: GridEngine) -> None:
    with engine.allocation("-pe", "loose", "6") as (host, job):
        status, out, err = run_in_job(host, job, "hostname")
        assert (status, out) == (1, ""), err
        assert "the parallel environment loose has control_slaves FALSE" in err, err
        _, out, err = run_on(host, job, *REIGEN, "check")
        assert "loose has control_slaves FALSE" in out, out + err


def test_more_tasks_than_slots_are_refused_and_the_job_lives(engine: GridEngine) -> None:
    with engine.allocation("-pe", "dealing", "3") as (host, job), contextlib.ExitStack() as stack:
        hearing = (*RUN, sys.executable, "-Sc", HEARING)
        for _ in range(2):  # Grid Engine takes one task more than there are slots
            running = stack.enter_context(closing(host.start(hearing, env={**job, **path_of_this_source()})))
            wait_for(lambda running=running: running.output()[0].count("ready") == 3, "ranks are ready")
        status, _, err = run_in_job(host, job, "hostname")
        assert (status, err.count("takes no task"), "as many tasks there as slots" in err) == (1, 2, True), err
        assert engine.num_jobs() == 1
        supervisors = [pid for pid, command in host.processes().items() if " -m reigen run " in command]
        for pid in supervisors:
            os.kill(pid, signal.SIGTERM)
        assert running.wait() == 143
        wait_for(lambda: not [each for each in commands(engine) if "launch.agent" in each], "the agents have ended")
        status, out, err = run_in_job(host, job, "--no-prefix", "hostname")
        assert (status, len(out.split())) == (0, 3), err


def test_an_agent_that_is_told_to_stop_ends_the_ranks_and_not_the_job(engine: GridEngine) -> None:
    with engine.allocation("-pe", "pairs", "4") as (host, job):
        other = next(each for each in engine.hosts if each is not host and each.name in dict(hosts_of(engine)))
        with closing(host.start([*RUN, sys.executable, "-Sc", HEARING], env={**job, **path_of_this_source()})) as first:
            wait_for(lambda: first.output()[0].count("ready") == 4, "ranks are ready")
            agent = min(pid for pid, command in other.processes().items() if "reigen.launch.agent" in command)
            os.kill(agent, signal.SIGTERM)
            assert first.wait() == 143
            assert f"host {other.name} was sent SIGTERM by Grid Engine" in first.output()[1]
        status, out, err = run_in_job(host, job, "--no-prefix", "hostname")
        assert (status, len(out.split())) == (0, 4), err


def test_functions_and_collectives_and_a_copied_directory(engine: GridEngine) -> None:
    program = engine.directory / "functions.py"
    program.write_text(
        "import socket, numpy, reigen\n"
        "def work():\n"
        "    reigen.init()\n"
        "    return socket.gethostname(), float(reigen.allreduce(numpy.ones(3), op=reigen.Sum)[0])\n"
        "if __name__ == '__main__':\n"
        "    print(reigen.run(work, num_proc=4))\n"
    )
    with engine.allocation("-pe", "pairs", "4") as (host, job):
        status, out, err = run_on(host, job, sys.executable, str(program))
        expected = [(name, 4.0) for name, slots in hosts_of(engine) for _ in range(slots)]
        assert (status, out) == (0, f"{expected}\n"), err
        shell = (
            f"mkdir /root/mine; cd /root/mine; echo text >file; exec {' '.join(RUN)} --sync-dst-dir /root/copy cat file"
        )
        status, out, err = run_on(host, job, "sh", "-c", shell)
        assert (status, sorted(out.splitlines())) == (0, [f"[{rank}] text" for rank in range(4)]), err


def test_a_deleted_job_is_gone_and_one_with_notify_is_told_before(engine: GridEngine) -> None:
    program = engine.directory / "hear.py"
    program.write_text(HEARING)
    lines = (EXPORT, f"exec {' '.join(RUN)} {sys.executable} -S {program}")
    for options in ((), ("-notify",)):
        job_id, output = engine.submit(f"deleted{len(options)}", lines, "-pe", "dealing", "5", *options)
        wait_for(lambda output=output: count(output, "ready") == 5, "ranks are ready")
        engine.run("qdel", job_id)
        wait_for(lambda: engine.num_jobs() == 0, "the job is gone")
        told = [count(output, f"[{rank}] heard SIGUSR2") for rank in range(5)]
        assert told == [1] * 5 if options else [0] * 5, output.read_text()
        wait_for(
            lambda: not [each for each in commands(engine) if "hear.py" in each or "agent" in each], "nothing left"
        )


def test_a_notice_puts_the_job_into_the_queue_again(engine: GridEngine) -> None:
    code = (
        "import os, signal, sys, time\n"
        "if os.environ['RESTARTED'] == '1': sys.exit(print('again'))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    program = engine.directory / "again.py"
    program.write_text(code)
    lines = (EXPORT, f"exec {' '.join(RUN)} --requeue-on-notice {sys.executable} -S {program}")
    _, output = engine.submit("again", lines, "-pe", "pairs", "4", "-r", "y")
    wait_for(lambda: count(output, "ready") == 4, "ranks are ready")
    found = [pid for host in engine.hosts for pid, each in host.processes().items() if "--requeue-on-notice" in each]
    pid = min(found)  # the watchdog, before the supervisor that it has started
    os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: count(output, "] again") == 4, "the job runs again")
    assert "the job has ended after a notice, and is to run again" in output.read_text()
    wait_for(lambda: engine.num_jobs() == 0, "the job is gone")


class Submitting:
    """`reigen launch --launcher sge` on the first host, in a directory of its own."""

    def __init__(self, engine: GridEngine, name: str) -> None:
        self.engine, self.directory = engine, engine.directory / name
        self.directory.mkdir()

    def command(self, *arguments: str) -> list[str]:
        return [*REIGEN, "launch", "--launcher", "sge", "--sge-pe", "dealing", *arguments]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return self.engine.run(*self.command(*arguments), env=path_of_this_source(), cwd=self.directory, timeout=90.0)


def test_reigen_launch_submits_a_job_with_servers(engine: GridEngine) -> None:
    submitting = Submitting(engine, "launched")
    program = submitting.directory / "train it.py"
    program.write_text(
        "import os, sys, numpy\n"
        "import reigen.kv\n"
        "store = reigen.kv.create('dist_sync')\n"
        "store.init(1, numpy.zeros(3))\n"
        "store.push(1, numpy.ones(3) * (store.rank + 1))\n"
        "out = numpy.zeros(3)\n"
        "store.pull(1, out)\n"
        "print('pulled', out[0], store.num_workers, sys.argv[1:], os.environ['MINE'])\n"
        "print('to stderr', file=sys.stderr)\n"
        "store.barrier()\n"
        "sys.exit(7 if store.rank == 2 else 0)\n"
    )
    arguments = ("-n", "3", "-s", "2", "--jobname", "J", "--env", "MINE=a b", "--sge-log-dir", "logs", "--no-prefix")
    status, out, err = submitting.run(*arguments, sys.executable, "train it.py", "x y", "$HOME")
    assert status == 7, out + err
    assert out.splitlines().count("pulled 6.0 3 ['x y', '$HOME'] a b") == 3, out + err
    assert err.count("to stderr\n") >= 3, err
    assert re.search(r"reigen run: Grid Engine job \d+ \(J\) is submitted", err), err
    assert "reigen run: rank 2" in err, err
    left = sorted(path.name for path in (submitting.directory / "logs").iterdir())
    assert [re.sub(r"\d+$", "", name) for name in left] == ["J.e", "J.o"], left


def test_what_is_submitted_can_be_seen_before(engine: GridEngine) -> None:
    submitting = Submitting(engine, "shown")
    status, out, err = submitting.run("-n", "3", "-s", "2", "--worker-memory", "4g", "--print", "python", "train.py")
    assert (status, list(submitting.directory.iterdir())) == (0, []), err
    assert "qsub -terse -cwd -S /bin/sh -N train.py -pe dealing 5 -l h_vmem=4096M" in out
    assert "-- python train.py\n" in out


def test_ctrl_c_deletes_the_submitted_job_and_a_queue_that_is_full_is_said(engine: GridEngine) -> None:
    submitting = Submitting(engine, "cancelled")
    arguments = submitting.command("-n", "3", "-s", "1", "--sge-log-dir", ".", sys.executable, "-c", HEARING)
    with closing(engine.start(*arguments, env=path_of_this_source(), cwd=submitting.directory)) as job:
        wait_for(lambda: job.output()[0].count("ready") >= 3, "workers are ready")
        launchers = [pid for pid, each in engine.hosts[0].processes().items() if "--launcher sge" in each]
        os.kill(min(launchers), signal.SIGINT)
        assert job.wait() == 130
        assert re.search(r"SIGINT: Grid Engine job \d+ \(.*\) is cancelled", job.output()[1]), job.output()[1]
    assert engine.num_jobs() == 0
    wait_for(lambda: not [each for each in commands(engine) if "agent" in each], "nothing left")
    assert not [path for path in submitting.directory.iterdir() if path.name.startswith(".")]
    status, _, err = submitting.run("-n", "1", "-s", "1", "--queue", "none.q", "true")
    assert status == 1
    assert "qsub has not taken the job" in err, err


def test_an_environment_is_chosen_if_it_is_the_only_one(engine: GridEngine) -> None:
    status, _, err = engine.run(
        *REIGEN, "launch", "--launcher", "sge", "-n", "1", "-s", "1", "true", env=path_of_this_source()
    )
    assert status == 1
    assert "which parallel environment? Say --sge-pe NAME; there are" in err, err
    assert "dealing (slots by $round_robin)" in err, err
    assert "loose" not in err, err
