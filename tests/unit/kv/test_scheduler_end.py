"""A scheduler at the begin and the end of its job: whom it waits for."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, closing

import pytest

from reigen.cluster.environ import DEPARTURE_FD_VARIABLE, ROSTER_FD_VARIABLE
from reigen.cluster.inherited_files import describe_inherited
from reigen.cluster.membership.messages import (
    MAX_MESSAGE_BYTES,
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    JobEnded,
    MemberLeft,
    MemberReturned,
    MembershipNews,
    RegisterMember,
    WorkerRoster,
)
from reigen.cluster.membership.recorded_job import RecordedEvent
from reigen.config import load_config
from reigen.kv.membership import scheduler as schedulers
from reigen.kv.membership.environment import read_process_config
from reigen.kv.membership.roster_record import RosterRecord
from reigen.kv.membership.scheduler import Scheduler, count_awaited
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from tests.kv.jobs import Port

OVER = JobEnded(0, "all workers have left")
#: What the scheduler before has recorded.
EVENTS = [
    RecordedEvent(MemberReturned("worker", 0, "h", 11, is_new=True), 1, (0, 0)),
    RecordedEvent(WorkerRoster((0,), is_open=True, incarnations=(11,)), 2),
    RecordedEvent(MemberLeft("worker", 0, "h", 11), 3),
    RecordedEvent(OVER, 4),
]


@pytest.mark.parametrize(
    ("ended", "registered", "num"),
    [
        ({}, [], 3),
        ({1: 0}, [(0, 0), (1, 0)], 2),
        ({0: 0, 1: 0, 2: 0}, [], 1),
        ({1: 0}, [(1, 0), (1, 1)], 3),  # another process has come in its place, and is one of the three
        ({1: 1}, [(1, 0), (1, 1)], 2),
        ({3: 0}, [(3, 0)], 3),  # not one of the first
    ],
)
def test_a_job_begins_without_the_first_processes_that_have_ended(
    ended: dict[int, int], registered: list[tuple[int, int]], num: int
) -> None:
    assert count_awaited(3, ended, registered) == num


def test_it_waits_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says that it runs, but not again before that was read: the pipe would be full at some time."""
    monkeypatch.setattr(schedulers, "_LINGER_SECONDS", 0.0)
    monkeypatch.setattr(schedulers, "_REPORT_SECONDS", 0.001)
    file, (reader, writer) = os.memfd_create("reigen-roster"), os.pipe()
    with closing(RosterRecord(os.dup(file))) as before:
        before.append(EVENTS)
    with closing(Port()) as port, ExitStack() as stack:
        variables = {
            "DMLC_ROLE": "scheduler",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port.number),
            "DMLC_NUM_WORKER": "1",
            "DMLC_NUM_SERVER": "2",
            "REIGEN_SECRET": os.urandom(32).hex(),
            "REIGEN_RENDEZVOUS": "127.0.0.1:1",
            "REIGEN_KV_ON_WORKER_LOSS": "elastic",
            ROSTER_FD_VARIABLE: describe_inherited(file),
            DEPARTURE_FD_VARIABLE: describe_inherited(writer),
        }
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        settings = read_process_config(variables, load_config(variables))
        scheduler = stack.enter_context(closing(Scheduler(settings, variables)))
        assert os.read(reader, 100) == b"joined 0 0\nopen\nleft 0 0\n"
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(scheduler.serve()))
        thread.start()
        deadline = time.monotonic() + 60.0
        for number in (1, 0):
            assert thread.is_alive(), "a server has still to come"
            me = Identity(ProcessRole.RANK, number, "kv server")
            assert settings.secret is not None
            with closing(open_connection(settings.scheduler, settings.secret, me, MAX_MESSAGE_BYTES, deadline)) as line:
                assert ended_by(line, number, settings.job, deadline) == OVER
        thread.join(60.0)
        assert os.read(reader, 100) == b"alive\n"
    assert codes == [0]


def ended_by(line: Connection, number: int, job: int, deadline: float) -> object:
    """Come again as a server, and return the last event that it is told."""
    message = RegisterMember(
        "server", number, "h", 21 + number, {"worker": 1, "server": 2}, address=f"127.0.0.1:{number + 1}", job=job
    )
    line.send(MEMBER_CODEC.encode(message), deadline)
    news = MEMBERSHIP_REPLY_CODEC.decode(line.receive(deadline))
    assert isinstance(news, MembershipNews), news
    return news.events[-1]
