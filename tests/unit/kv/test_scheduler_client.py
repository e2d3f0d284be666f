"""A member of a job, and a scheduler that is played by the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from reigen.cluster.bootstrap.job_credentials import derive_job_secret
from reigen.cluster.membership.messages import (
    MAX_MESSAGE_BYTES,
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    JobEnded,
    MemberAssigned,
    MemberMessage,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    StatusQuery,
    StatusReply,
)
from reigen.config import load_config
from reigen.errors import DeadlineError
from reigen.kv.membership.environment import read_process_config
from reigen.kv.membership.scheduler import SCHEDULER_IDENTITY
from reigen.kv.membership.scheduler_client import SchedulerClient, _flush
from reigen.net import auth
from reigen.net.connection import Connection, ConnectionOptions, StreamProtocol
from reigen.net.listener import MessageListener
from tests.kv.jobs import Port

SECRET = b"s" * 32


@contextmanager
def member_of(answer: Callable[[MemberMessage], MembershipReply | None]) -> Iterator[SchedulerClient]:
    """Worker 0 of one, whose scheduler says what the function does."""

    def receive(guest: Connection, payload: bytes) -> None:
        if (said := answer(MEMBER_CODEC.decode(payload))) is not None:
            reception.send(guest, MEMBERSHIP_REPLY_CODEC.encode(said))

    with closing(Port()) as held:  # the secret of a job depends on its port
        port = held.number
        secret = derive_job_secret(SECRET, f"kv {port}")
        reception = MessageListener(
            ("127.0.0.1", port),
            ConnectionOptions(secret, SCHEDULER_IDENTITY, MAX_MESSAGE_BYTES, peer_timeout_seconds=20.0),
            receive,
            lambda *_: None,
        )
    variables = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "2",
        "REIGEN_SECRET": SECRET.hex(),
        "REIGEN_START_TIMEOUT": "40",
        "REIGEN_PEER_TIMEOUT": "1",
    }
    with closing(reception):
        thread = threading.Thread(target=lambda: all(iter(lambda: reception.turn(None), False)))
        thread.start()
        try:
            with closing(
                SchedulerClient(read_process_config(variables, load_config(variables)), "", time.monotonic() + 40)
            ) as member:
                yield member
        finally:
            reception.end()
            thread.join(10)


def assigned(call: MemberMessage) -> MembershipReply | None:
    return MemberAssigned(0, False, 1) if isinstance(call, RegisterMember) else None


def test_who_is_missing_at_the_start_is_asked_of_the_scheduler() -> None:
    def answer(call: MemberMessage) -> MembershipReply | None:
        return StatusReply((), (1,)) if isinstance(call, StatusQuery) else assigned(call)

    with member_of(answer) as member, pytest.raises(DeadlineError, match="server 1 of 1 worker"):
        member.servers(time.monotonic())


def test_what_the_scheduler_said_before_it_went_is_heard_though_it_did_not_hear_everything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        here.sendall(b"a heartbeat that nobody reads")
        assert there.recv(1, socket.MSG_PEEK)
        there.sendall(b"it was given up")
        there.close()
        conversation = StreamProtocol(auth.ServerHandshake(SECRET, SCHEDULER_IDENTITY), 100)
        conversation.outgoing += b"another one"
        assert _flush(Connection(here, conversation))
        assert here.recv(100) == b"it was given up"


def test_a_scheduler_that_ends_the_job_instead_of_an_answer_says_who_is_missing() -> None:
    def answer(call: MemberMessage) -> MembershipReply | None:
        if isinstance(call, StatusQuery):
            return MembershipNews((JobEnded(1, "server 1 did not come in time", is_late=True),))
        return assigned(call)

    with member_of(answer) as member, pytest.raises(DeadlineError, match="server 1 did not come in time"):
        member.servers(time.monotonic())
