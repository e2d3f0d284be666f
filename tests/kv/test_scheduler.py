"""A scheduler, and workers and servers that are processes: started by hand, missing, stopped, killed, replaced."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from reigen.cluster.bootstrap.job_credentials import derive_job_secret
from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.cluster.membership.messages import (
    MAX_MESSAGE_BYTES,
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    MemberAssigned,
    MemberRole,
    RegisterMember,
)
from reigen.config import load_config
from reigen.kv.membership.discovery import SchedulerLocator
from reigen.kv.membership.environment import read_process_config
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from tests.kv.jobs import DEADLINE_SECONDS, SCHEDULER, Job, Process

pytestmark = pytest.mark.slow
#: It lets those who know the job come first for as long as a test may take.
PATIENT = (
    "from reigen.cli.main import main; from reigen.kv.membership import scheduler; "
    "scheduler._KNOWN_FIRST_SECONDS = 1e6; "
)
PATIENT_SCHEDULER = (sys.executable, "-c", f"{PATIENT}main(['scheduler'])")


def leave(scheduler: Process, servers: list[Process], workers: list[Process]) -> None:
    """All workers leave; everybody else ends by that."""
    for worker in workers:
        worker.ask("leave")
        assert worker.end() == 0
    for server in servers:
        while "the job is over: all workers have left" not in (events := server.ask("events"))[-1]:
            assert "has left in good order" in events[-1]
        assert server.end() == 0
    assert scheduler.end() == 0


def ended(error: dict[str, object], kind: str) -> str:
    assert error["error"] == kind, error
    return str(error["text"])


def test_mxnets_variables_are_enough_on_one_host() -> None:
    with Job(2, 1) as job:
        workers = [job.node("worker"), job.node("worker")]  # the scheduler comes last
        server = job.node("server")
        scheduler = job.scheduler()
        assert server.hear()["joined"] == 0
        assert sorted(worker.hear()["joined"] for worker in workers) == [0, 1]
        assert [worker.ask("servers") for worker in workers] == [[[0, f"127.0.0.1:{server.pid}"]]] * 2
        for _ in range(3):
            workers[0].tell("barrier epoch")
            assert workers[1].ask("barrier epoch") == "done"
            assert workers[0].hear() == "done"
        leave(scheduler, [server], workers)
        assert "worker 1 on host" in scheduler.errors()  # PS_VERBOSE=1


def test_ranks_are_task_numbers_whoever_comes_first() -> None:
    with Job(3, 1) as job:
        scheduler, server = job.scheduler(), job.node("server")
        workers = {}
        for number in (2, 0, 1):
            workers[number] = job.node("worker", number)
            assert workers[number].hear()["joined"] == number
        server.hear()
        assert workers[0].ask("dead 60") == 0
        assert workers[0].ask("dead 0") == 3  # who has said nothing just now, as this worker has
        leave(scheduler, [server], list(workers.values()))


def test_who_does_not_start_is_named_to_all() -> None:
    with Job(3, 2) as job:
        scheduler = job.scheduler(REIGEN_START_TIMEOUT="1")
        server = job.node("server", 1)
        server.hear()
        assert "workers 0, 1 and 2, server 0 did not come in time" in server.ask("events")[-1]
        assert scheduler.end() == 1
        late = job.node("server", 0, REIGEN_START_TIMEOUT="0.5")  # when all is over
        assert "is the job not over already?" in ended(late.hear(), "DeadlineError")
        assert "server 0" in scheduler.errors()


def test_a_worker_that_does_not_want_to_wait_any_longer_is_told_who_is_missing() -> None:
    with Job(3, 2, REIGEN_START_TIMEOUT="40") as job:
        job.scheduler()
        server, worker = job.node("server", 1), job.node("worker", 1, SERVERS_SECONDS="0.2")
        for node in (server, worker):
            node.hear()
        assert "workers 0 and 2, server 0" in ended(worker.ask("servers"), "DeadlineError")


def test_workers_are_waited_for_longer_but_it_is_said_who_is_missing() -> None:
    with Job(2, 1) as job:
        scheduler, server = job.scheduler(REIGEN_START_TIMEOUT="1"), job.node("server")
        scheduler.wait_for("missing 1 s after the first process came: workers 0 and 1.")
        workers = [job.node("worker", number) for number in range(2)]
        assert [worker.hear()["joined"] for worker in workers] == [0, 1]
        server.hear()
        leave(scheduler, [server], workers)


def test_without_a_scheduler_it_is_missed_by_the_deadline() -> None:
    with Job(1, 1, REIGEN_START_TIMEOUT="0.5") as job:
        text = ended(job.node("worker").hear(), "DeadlineError")
        assert f"127.0.0.1:{job.variables['DMLC_PS_ROOT_PORT']}" in text
        assert "did not answer within 0.5 s (REIGEN_START_TIMEOUT); was it started, and is the job not over" in text


def test_a_stranger_at_the_schedulers_port_is_not_believed_and_named_by_the_port() -> None:
    with Job(1, 1, REIGEN_SECRET=os.urandom(32).hex()) as job:
        place = f"127.0.0.1:{job.variables['DMLC_PS_ROOT_PORT']}"
        with socket.create_server(("127.0.0.1", int(job.variables["DMLC_PS_ROOT_PORT"]))) as stranger:
            scheduler, worker = job.scheduler(), job.node("worker")
            assert scheduler.end() == 1
            assert f"the scheduler cannot listen at {place}: Address already in use. Is another" in scheduler.errors()
            stranger.settimeout(0.1)
            while worker.returncode is None:
                with suppress(TimeoutError), stranger.accept()[0] as connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            text = ended(worker.hear(), "AuthenticationError")
            assert f"the scheduler at {place} (DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT) cannot be believed" in text
            assert "does not speak Reigen's protocol" in text


def test_a_scheduler_to_whom_nobody_comes_says_so() -> None:
    with Job(1, 1, REIGEN_DEADLINE="0.3") as job:
        scheduler = job.scheduler()
        assert scheduler.end() == 1
        assert "no worker and no server came within 0.3 s" in scheduler.errors()


def test_a_scheduler_may_be_killed_and_started_again() -> None:
    with Job(2, 1, REIGEN_PEER_TIMEOUT="15") as job:
        scheduler, servers, workers = job.all()
        before = [workers[0].ask("servers"), workers[1].ask("servers")]
        workers[0].tell("barrier epoch")
        for _ in range(2):
            scheduler.kill()
            scheduler = job.scheduler()
        assert workers[1].ask("barrier epoch") == "done"
        assert workers[0].hear() == "done"
        assert [workers[0].ask("servers"), workers[1].ask("servers")] == before
        workers[1].tell("barrier epoch")
        assert workers[0].ask("barrier epoch") == "done"
        workers[1].kill()  # the new one notices, too
        text = ended(workers[0].ask("barrier epoch"), "PeerLostError")
        assert "worker 1 on host" in text
        del servers


def test_a_scheduler_may_die_with_who_kept_the_secret_and_be_away_when_workers_leave() -> None:
    with Job(2, 1, REIGEN_KV_ON_WORKER_LOSS="wait", PYTHONHASHSEED="0") as job:
        scheduler, keeper = job.scheduler(), job.node("worker", 0)
        keeper.hear()  # nobody else is there to keep it
        server, worker = job.node("server", 0), job.node("worker", 1)
        secret = server.hear()["secret"]
        assert worker.hear()["secret"] == secret
        scheduler.kill()
        keeper.kill()
        assert job.wait_for_secret_keeper() in {worker, server}
        scheduler, second = job.scheduler(), job.node("worker", 0)
        assert second.hear()["secret"] == secret
        second.tell("barrier epoch")
        assert worker.ask("barrier epoch") == "done"
        second.hear()
        scheduler.kill()
        for each in (second, worker):
            each.wait_for("connecting again")
            each.ask("leave")
            each.let_go()
        scheduler = job.scheduler()
        assert "all workers have left" in server.ask("serve")[-1]
        assert [each.end() for each in (second, worker, server, scheduler)] == [0] * 4


def test_a_scheduler_that_stays_away_ends_the_job() -> None:
    with Job(2, 1, REIGEN_PEER_TIMEOUT="1") as job:
        scheduler, servers, workers = job.all()
        scheduler.kill()
        assert "has gone, and was not started again within 1 s" in ended(workers[0].ask("barrier b"), "PeerLostError")
        assert "the scheduler at" in servers[0].ask("events")[-1]


def test_a_scheduler_that_stops_is_told_by_the_deadline_and_may_go_on() -> None:
    with Job(2, 1, REIGEN_PEER_TIMEOUT="1") as job:
        scheduler, servers, workers = job.all()
        scheduler.signal(signal.SIGSTOP)
        text = ended(workers[0].ask("barrier b 0.1"), "DeadlineError")
        assert "does not answer; whether others have passed it is not known" in text
        scheduler.signal(signal.SIGCONT)
        assert workers[0].ask("dead 60") == 0  # the scheduler hears this behind its having given up
        assert "no process passes it" in ended(workers[1].ask("barrier b"), "DeadlineError")  # the first gave it up
        workers[0].tell("barrier b")
        assert workers[1].ask("barrier b") == "done"
        workers[0].hear()
        leave(scheduler, servers, workers)


def test_who_does_not_come_to_a_barrier_is_named() -> None:
    with Job(3, 1) as job:
        scheduler, servers, workers = job.all()
        workers[2].tell("barrier b")
        error = workers[0].ask("barrier b 6")  # the other one is there by then
        assert "worker 1 did not come to barrier 'b' in time" in ended(error, "DeadlineError")
        assert error["ranks"] == [1]
        for worker in (workers[2].hear(), workers[1].ask("barrier b")):  # it ends alike for all, who comes late, too
            assert ended(worker, "DeadlineError") == error["text"]
        for worker in workers[:2]:
            worker.tell("barrier b")
        assert workers[2].ask("barrier b") == "done"
        assert [worker.hear() for worker in workers[:2]] == ["done", "done"]
        leave(scheduler, servers, workers)


def test_who_knows_the_secret_and_talks_nonsense_is_closed() -> None:
    given = "ab" * 32
    with Job(1, 1, REIGEN_SECRET=given) as job:
        everybody = job.all()
        port = int(job.variables["DMLC_PS_ROOT_PORT"])
        secret, me = derive_job_secret(bytes.fromhex(given), f"kv {port}"), Identity(ProcessRole.RANK, 7)
        deadline = time.monotonic() + DEADLINE_SECONDS
        for nonsense in (
            b"",
            b"\xff" * 100,
            MEMBER_CODEC.encode(RegisterMember("worker", 0, "", 5, {"worker": 1, "server": 1}))[:-1],
        ):
            with closing(open_connection(("127.0.0.1", port), secret, me, MAX_MESSAGE_BYTES, deadline)) as stream:
                stream.send(nonsense, deadline)
                with pytest.raises(ConnectionError):
                    stream.receive(deadline)
        leave(*everybody)


def test_those_who_know_the_job_come_first_to_a_scheduler_that_follows_another() -> None:
    secret, me = os.urandom(32), Identity(ProcessRole.RANK, 7)
    with Job(2, 1) as job:
        settings = read_process_config(job.variables, load_config(job.variables), "worker")
        with closing(SchedulerLocator(settings)) as access, ExitStack() as stack:
            access.keep(secret)
            scheduler = job.start(PATIENT_SCHEDULER, PS_VERBOSE="1")
            scheduler.wait_for("scheduler of 2 worker(s)")
            deadline = time.monotonic() + DEADLINE_SECONDS
            unknown, known = (
                stack.enter_context(
                    closing(open_connection(settings.scheduler, secret, me, MAX_MESSAGE_BYTES, deadline))
                )
                for _ in range(2)
            )
            counts: dict[MemberRole, int] = {"worker": 2, "server": 1}
            unknown.send(MEMBER_CODEC.encode(RegisterMember("worker", 1, "here", 5, counts)), deadline)
            scheduler.wait_for("worker 1 registers")
            known.send(MEMBER_CODEC.encode(RegisterMember("worker", 0, "here", 6, counts, job=77)), deadline)
            told = [MEMBERSHIP_REPLY_CODEC.decode(stream.receive(deadline)) for stream in (known, unknown)]
    assert told == [MemberAssigned(0, False, 77, epoch=1), MemberAssigned(1, True, 77, epoch=2)]


def test_a_worker_that_is_killed_is_named_to_the_others() -> None:
    with Job(3, 1) as job:
        scheduler, servers, workers = job.all()
        workers[0].tell("barrier b")
        workers[1].kill()
        error = workers[0].hear()
        assert "worker 1 on host" in ended(error, "PeerLostError")
        assert error["ranks"] == [1]
        assert workers[0].ask("dead") == 1
        assert "worker 1" in servers[0].ask("events")[-1]
        for number in (0, 2):
            workers[number].end()
        assert scheduler.end() == WORKERS_LOST_EXIT_CODE


def test_a_worker_that_stops_is_lost_and_stays_so() -> None:
    with Job(2, 1, PS_HEARTBEAT_INTERVAL="0.2", PS_HEARTBEAT_TIMEOUT="8") as job:
        _, _, workers = job.all()
        workers[1].signal(signal.SIGSTOP)
        assert "nothing was heard of it for 8 s" in ended(workers[0].ask("barrier b"), "PeerLostError")
        workers[1].signal(signal.SIGCONT)
        text = ended(workers[1].ask("barrier b"), "PeerLostError")
        assert "nothing was heard of it for 8 s" in text or "the job is over" in text


def test_the_others_go_on_without_a_lost_worker_where_that_is_the_policy() -> None:
    with Job(3, 1, REIGEN_KV_ON_WORKER_LOSS="continue") as job:
        scheduler, servers, workers = job.all()
        workers[0].tell("barrier b")
        workers[2].tell("barrier b")
        workers[1].kill()
        assert (workers[0].hear(), workers[2].hear()) == ("done", "done")
        assert "worker 1" in servers[0].ask("events")[0]
        for number in (0, 2):
            workers[number].ask("leave")
            assert workers[number].end() == 0
        assert scheduler.end() == 0


def test_a_replacement_takes_the_place_of_a_lost_worker() -> None:
    with Job(2, 1, REIGEN_KV_ON_WORKER_LOSS="wait") as job:
        scheduler, servers, workers = job.all()
        workers[1].tell("barrier b")
        assert workers[0].ask("barrier b") == "done"
        workers[0].tell("barrier b")
        workers[1].kill()
        second = job.node("worker")  # without a number: the one that is free
        assert second.hear() | {"secret": 0} == {"joined": 1, "recovers": True, "secret": 0}
        assert second.ask("barrier b") == "done"
        assert workers[0].hear() == "done"
        leave(scheduler, servers, [workers[0], second])


def test_a_server_that_is_killed_ends_the_job_by_name() -> None:
    with Job(1, 2) as job:
        scheduler, servers, workers = job.all()
        servers[1].kill()
        assert "server 1 on host" in workers[0].ask("events")[0]
        assert "server 1 on host" in ended(workers[0].ask("barrier b"), "PeerLostError")
        assert workers[0].end() == 0
        assert scheduler.end() == 1


def test_a_server_with_snapshots_may_be_started_again(tmp_path: Path) -> None:
    with Job(1, 2, REIGEN_KV_SNAPSHOT_DIR=str(tmp_path)) as job:
        scheduler, servers, workers = job.all()
        assert len(workers[0].ask("servers")) == 2
        servers[1].kill()
        again = job.node("server", 1)
        assert again.hear()["recovers"]
        events: list[str] = []
        while not any("server 1 is there again" in event for event in events):
            events += workers[0].ask("events")
        assert workers[0].ask("servers")[1] == [1, f"127.0.0.1:{again.pid}"]
        leave(scheduler, [servers[0], again], workers)


def test_several_jobs_on_one_machine_do_not_meet() -> None:
    with Job(1, 1) as one, Job(1, 1) as other:
        first, second = one.all(), other.all()
        assert first[2][0].ask("servers") == [[0, f"127.0.0.1:{first[1][0].pid}"]]
        assert second[2][0].ask("servers") == [[0, f"127.0.0.1:{second[1][0].pid}"]]
        leave(*first)
        leave(*second)


def test_a_number_that_is_taken_is_refused() -> None:
    with Job(2, 1, PS_HEARTBEAT_INTERVAL="0.2") as job:
        scheduler, servers, workers = job.all()
        assert "worker 1 is there already, on host" in ended(job.node("worker", 1).hear(), "ConfigError")
        assert "all 2 worker(s) of this job are there" in ended(job.node("worker").hear(), "ConfigError")
        assert "it expects 5 worker(s)" in ended(job.node("worker", DMLC_NUM_WORKER="5").hear(), "ConfigError")
        leave(scheduler, servers, workers)


def test_another_secret_is_refused_and_disturbs_nobody() -> None:
    with Job(1, 1, REIGEN_SECRET="ab" * 32) as job:
        scheduler, servers, workers = job.all()
        wrong = job.node("worker", REIGEN_SECRET="cd" * 32).hear()
        assert "does not know this job's secret" in ended(wrong, "AuthenticationError")
        scheduler.wait_for("nobody there has proven to know the secret")
        leave(scheduler, servers, workers)


def test_a_port_that_is_taken_is_told() -> None:
    with Job(1, 1) as job:
        port = int(job.variables["DMLC_PS_ROOT_PORT"])
        with socket.create_server(("127.0.0.1", port)):
            scheduler = job.scheduler()
            assert scheduler.end() == 1
            assert f"cannot listen at 127.0.0.1:{port}: {os.strerror(98)}" in scheduler.errors()
            text = ended(job.node("worker", REIGEN_START_TIMEOUT="0.5").hear(), "DeadlineError")
            assert str(port) in text


def test_a_scheduler_that_is_elsewhere_needs_a_secret_and_cannot_be_started_here() -> None:
    with Job(1, 1) as job:
        elsewhere = {"DMLC_PS_ROOT_URI": "192.0.2.7"}
        text = ended(job.node("worker", **elsewhere).hear(), "ConfigError")
        assert "192.0.2.7 (DMLC_PS_ROOT_URI), which is another host" in text
        assert "REIGEN_SECRET_FILE" in text
        scheduler = job.start(SCHEDULER, **elsewhere)
        assert scheduler.end() == 1
        assert "DMLC_PS_ROOT_URI is 192.0.2.7 and that is no address of this host" in scheduler.errors()


def test_addresses_of_ipv6() -> None:
    with Job(1, 1, host="::1", DMLC_NODE_HOST="::1") as job:
        scheduler, servers, workers = job.all()
        assert workers[0].ask("servers") == [[0, f"[::1]:{servers[0].pid}"]]
        leave(scheduler, servers, workers)
