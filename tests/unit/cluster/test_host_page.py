"""What an agent and the processes of a host tell each other in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from reigen.cluster.membership.elastic.host_page import HostPage
from reigen.cluster.membership.elastic.voter_memory import VoterMemory
from reigen.cluster.membership.rendezvous import ReconnectingRendezvous, Rendezvous
from reigen.errors import ArgumentError, PeerLostError


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("voter", os.MFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def test_an_empty_page(memory: int):
    assert (HostPage(memory).launcher, HostPage(memory).finished) == ("", None)


def test_what_is_written_is_read_beside_the_voter(memory: int):
    voter = VoterMemory(memory, "h")
    try:
        HostPage(memory).write_launcher("10.0.0.1:1234")
        voter.page.write_finished(0)
        assert voter.page.launcher == "10.0.0.1:1234"
        assert HostPage(memory).finished == 0
        HostPage(memory).write_launcher("[::1]:1")
        assert voter.page.launcher == "[::1]:1"
    finally:
        voter.close()
    again = VoterMemory(memory, "h")
    assert again.id == voter.id
    again.close()


def test_half_an_address_is_none(memory: int):
    page = HostPage(memory)
    page.write_launcher("10.0.0.1:1234")
    os.pwrite(memory, b"9", 1024 + 8)
    assert page.launcher == ""
    with pytest.raises(ArgumentError, match="at most 256 bytes"):
        page.write_launcher("x" * 257)


class Service:
    """A rendezvous that may have gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_there = True
        self.num_connections = 0

    def connect(self) -> Rendezvous:
        self.num_connections += 1
        if not self.is_there:
            raise PeerLostError("nobody listens")
        return _Client(self)


class _Client(Rendezvous):
    def __init__(self, service: Service) -> None:
        self._service = service

    def request(self, message, timeout_seconds=0.0):  # type: ignore[no-untyped-def]
        if not self._service.is_there:
            raise PeerLostError("it has gone")
        self._service.values[message.key] = message.value

    def close(self) -> None:
        pass


def test_a_rendezvous_that_moves():
    services, where = {"a": Service(), "b": Service()}, ["a"]
    rendezvous = ReconnectingRendezvous(lambda: where[0], lambda address: services[address].connect())  # type: ignore[arg-type,return-value]
    rendezvous.put("x", b"1")
    rendezvous.put("x", b"2")
    assert services["a"].num_connections == 1
    services["a"].is_there = False
    for _ in range(2):
        with pytest.raises(PeerLostError):
            rendezvous.put("x", b"3")
    where[0] = "b"
    rendezvous.put("x", b"4")
    assert services["b"].values == {"x": b"4"}
    where[0], services["a"].is_there = "a", True
    rendezvous.put("x", b"5")
    assert services["a"].values == {"x": b"5"}
