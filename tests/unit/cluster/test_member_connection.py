"""A member's connection: what the service said before it hung up is heard."""

import select
import time

import pytest

from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.member_connection import MemberConnection
from reigen.cluster.membership.messages import MAX_MESSAGE_BYTES, RegisterMember
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.membership.view import JobView
from reigen.net.auth import Identity, ProcessRole
from reigen.net.stream import connect_stream

SECRET = b"s" * 32


def test_a_refusal_is_heard_before_the_end_of_the_connection():
    service = ControlService(SECRET)
    service.start()
    try:
        deadline = time.monotonic() + 60
        me = Identity(ProcessRole.RANK, 5)
        stream = connect_stream(split_address(service.address), SECRET, me, MAX_MESSAGE_BYTES, deadline)
        view = JobView(RegisterMember("rank", 5, "here", 77, {"rank": 2}))
        connection = MemberConnection(stream, view, 60.0)
        connection.flush_until(deadline)
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)
        assert poll.poll(60_000), "the service has hung up"
        connection.receive()
        assert view.refusal == "there is no rank 5 among 2"
        with pytest.raises(ConnectionResetError):
            connection.receive()
        connection.close()
    finally:
        service.close()
