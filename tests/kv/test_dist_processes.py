"""Whole jobs of processes, started by hand as MXNet's are: one script for workers and servers, and a scheduler."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kv.jobs import Job, Process

pytestmark = pytest.mark.slow

SCRIPT = (sys.executable, str(Path(__file__).with_name("script.py")))
SERVER = (sys.executable, "-m", "reigen", "server")
CUT = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000", "REIGEN_KV_SLICE_BYTES": "4096"}


def start(job: Job, role: str, number: int, **variables: str) -> Process:
    """A process of the script; every other server is `reigen server`."""
    command = SERVER if role == "server" and number % 2 else SCRIPT
    return job.start(command, DMLC_ROLE=role, DMLC_TASK_ID=str(number), **variables)


def start_all(job: Job) -> tuple[Process, list[Process], list[Process]]:
    """The scheduler, the servers, and the workers, whose stores exist."""
    scheduler = job.scheduler()
    servers = [start(job, "server", number) for number in range(int(job.variables["DMLC_NUM_SERVER"]))]
    workers = [start(job, "worker", number) for number in range(int(job.variables["DMLC_NUM_WORKER"]))]
    for rank, worker in enumerate(workers):
        assert worker.hear() == {"rank": rank, "workers": len(workers), "recovers": False}
    return scheduler, servers, workers


def ask(workers: list[Process], command: str) -> list[Any]:
    """Have all do the same at the same time."""
    for worker in workers:
        worker.tell(command)
    return [worker.hear() for worker in workers]


def end(*processes: Process) -> None:
    """Everybody ends by itself, in good order."""
    for process in processes:
        assert process.end() == 0, process.errors()


@pytest.mark.parametrize(
    ("dtype", "variables"),
    [
        ("float32", {}),
        ("float16", {"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "50", "PS_DROP_MSG": "10"}),
        ("float32", {"REIGEN_KV_SHARED_MEMORY": "0", "STORE": "dist_async"}),
    ],
    ids=["reliable", "unreliable", "async by sockets"],
)
def test_the_closed_form_holds(dtype: str, variables: dict[str, str]) -> None:
    with Job(2, 2, **CUT, **variables) as job:
        scheduler, servers, workers = start_all(job)
        assert ask(workers, f"begin 0.5 {dtype}") == ["done"] * 2
        ask(workers, "push 2")
        ask(workers, "step 2")
        ask(workers, "barrier")
        assert ask(workers, "pull") == [[1 + 0.5 * 4 * 3]] * 2
        assert ask(workers, "rounds") == [4] * 2
        end(*workers, *servers, scheduler)


def test_servers_and_scheduler_never_return_into_the_script() -> None:
    with Job(1, 1) as job:
        scheduler = job.start(SCRIPT, DMLC_ROLE="scheduler")
        server = start(job, "server", 0)
        worker = start(job, "worker", 0)
        worker.hear()
        end(worker, server, scheduler)
        for process in (scheduler, server):
            with pytest.raises(AssertionError, match="it has ended"):
                process.hear()


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_counted_twice() -> None:
    with Job(2, 2, **CUT, REIGEN_KV_ON_WORKER_LOSS="wait") as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        ask(workers, "step 2")
        workers[1].ask("push 1")
        workers[1].kill()
        workers[0].tell("step 3")
        second = start(job, "worker", 1)
        assert second.hear() == {"rank": 1, "workers": 2, "recovers": True}
        second.ask("begin 1")
        done = second.ask("rounds")
        assert done in {2, 3}
        assert second.ask(f"step {5 - done}") == workers[0].hear() == [1 + 5 * 3]
        end(workers[0], second, *servers, scheduler)


def test_a_killed_worker_is_named_on_all_others() -> None:
    with Job(3, 2, **CUT) as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin")
        ask(workers, "step 1")
        workers[2].ask("fork")
        workers[2].kill()
        for told in ask(workers[:2], "step 1"):
            assert told["error"] == "PeerLostError", told
            assert told["ranks"] == [2]
            assert "worker 2 on host" in told["text"]
            assert "was lost in round 2" in told["text"]
            assert "its process ended" in told["text"], "its child does not keep it alive"
        assert scheduler is not None
        assert len(servers) == 2


def test_a_stopped_worker_is_named_when_nothing_is_heard_of_it() -> None:
    with Job(2, 1, PS_HEARTBEAT_INTERVAL="0.2", PS_HEARTBEAT_TIMEOUT="8") as job:
        _, _, workers = start_all(job)
        ask(workers, "begin")
        workers[1].signal(signal.SIGSTOP)
        told = workers[0].ask("step 1")
        assert (told["error"], told["ranks"]) == ("PeerLostError", [1]), told
        assert "nothing was heard" in told["text"]


def test_a_killed_server_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    with Job(2, 2, **CUT, REIGEN_KV_SNAPSHOT_DIR=str(tmp_path), REIGEN_KV_SNAPSHOT_SECONDS="0") as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        ask(workers, "step 2")
        workers[0].tell("step 2")
        servers[0].kill()
        second = start(job, "server", 0)
        workers[1].tell("step 2")
        assert [worker.hear() for worker in workers] == [[1 + 4 * 3]] * 2
        end(*workers, second, servers[1], scheduler)


@pytest.mark.parametrize("victim", ["server", "server and worker"])
@pytest.mark.parametrize("secret", ["given", "made"])
def test_new_processes_wait_at_a_new_scheduler_for_those_who_know_the_job(
    secret: str, victim: str, tmp_path: Path
) -> None:
    given = {"REIGEN_SECRET": "5e" * 32} if secret == "given" else {}
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path), "REIGEN_KV_SNAPSHOT_SECONDS": "0"}
    with Job(2, 2, **CUT, **keeps, **given, REIGEN_KV_ON_WORKER_LOSS="wait") as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        ask(workers, "step 2")
        others = [workers[0], servers[1]] + ([workers[1]] if victim == "server" else [])
        killed = [one for one in (*workers, *servers) if one not in others]
        for process in others:
            process.signal(signal.SIGSTOP)
        for process in (scheduler, *killed):
            process.kill()
        if secret == "made":  # nobody else could tell it
            (job.secret_keeper() or others[0]).signal(signal.SIGCONT)
            job.wait_for_secret_keeper()
        again = job.scheduler()
        second = start(job, "server", 0)
        if victim == "server and worker":
            workers[1] = start(job, "worker", 1)
        again.wait_for("server 0 registers from host")
        for process in others:
            process.signal(signal.SIGCONT)
        if victim == "server and worker":
            assert workers[1].hear() == {"rank": 1, "workers": 2, "recovers": True}
            assert workers[1].ask("begin 1") == "done"
            assert workers[1].ask("rounds") == 2
        assert ask(workers, "step 2") == [[1 + 4 * 3]] * 2
        end(*workers, second, servers[1], again)


def test_a_scheduler_waits_for_the_process_that_keeps_the_secret_and_is_stopped() -> None:
    with Job(2, 1, **CUT) as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        keeper = job.wait_for_secret_keeper()
        keeper.signal(signal.SIGSTOP)
        scheduler.kill()
        second = job.scheduler()
        second.wait_for("the process that keeps the job's secret does not answer")
        keeper.signal(signal.SIGCONT)
        assert ask(workers, "barrier") == ["done"] * 2
        assert ask(workers, "step 1") == [[1 + 3]] * 2
        end(*workers, *servers, second)


def test_a_new_job_with_the_secret_of_one_that_failed_begins_anew_and_leaves_its_snapshots(tmp_path: Path) -> None:
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path), "REIGEN_KV_SNAPSHOT_SECONDS": "0"}
    with Job(1, 1, **CUT, **keeps, REIGEN_SECRET="5e" * 32) as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        ask(workers, "step 2")
        for process in (scheduler, *servers, *workers):
            process.kill()
        left = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        assert left
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        assert ask(workers, "step 1") == [[1 + 1]]
        end(*workers, *servers, scheduler)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == left


def test_a_killed_server_without_snapshots_is_named() -> None:
    with Job(2, 2, **CUT, REIGEN_PEER_TIMEOUT="3") as job:
        _, servers, workers = start_all(job)
        ask(workers, "begin 1")
        servers[1].kill()
        for told in ask(workers, "step 1"):
            assert told["error"] == "PeerLostError", told
            assert "server 1 on host" in told["text"]


def test_the_scheduler_may_be_started_again() -> None:
    with Job(2, 1, **CUT) as job:
        scheduler, servers, workers = start_all(job)
        ask(workers, "begin 1")
        ask(workers, "step 1")
        scheduler.kill()
        assert ask(workers, "step 1") == [[1 + 2 * 3]] * 2
        second = job.scheduler()
        assert ask(workers, "barrier") == ["done"] * 2
        assert ask(workers, "step 1") == [[1 + 3 * 3]] * 2
        end(*workers, *servers, second)


def test_a_script_that_fails_is_a_lost_worker() -> None:
    with Job(2, 1) as job:
        _, _, workers = start_all(job)
        ask(workers, "begin")
        workers[1].tell("fail")
        assert workers[1].end() == 1
        told = workers[0].ask("step 1")
        assert (told["error"], told["ranks"]) == ("PeerLostError", [1]), told


def test_missing_servers_are_named_at_the_start() -> None:
    with Job(1, 2) as job:
        scheduler = job.scheduler()
        start(job, "server", 0)
        scheduler.wait_for("server 0 registers")
        worker = start(job, "worker", 0, REIGEN_START_TIMEOUT="6")
        told = worker.hear()
        assert told["error"] == "DeadlineError", told
        assert "server 1" in told["text"]
