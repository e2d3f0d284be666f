"""Service of the views of an elastic job: who connects to it when, and what becomes of the connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from reigen.cluster.membership.elastic.view_service import ViewService, view_service_address
from reigen.cluster.membership.rendezvous import PrefixRendezvous, RendezvousClient
from reigen.cluster.membership.views.record import MemberId, StepBase, View, ViewHost, ViewMember
from reigen.net.listener import open_listening_socket

SECRET = b"s" * 32


class Members:
    """Services of processes 0, 1, ... of one host."""

    def __init__(self, stack: ExitStack, size: int) -> None:
        self.sockets = [open_listening_socket("127.0.0.1")[0] for _ in range(size)]
        self.services = [
            ViewService(
                SimpleNamespace(me=MemberId(slot, 0), serving=listening, peer_timeout_seconds=20.0),  # type: ignore[arg-type]
                SECRET,
                None,
            )
            for slot, listening in enumerate(self.sockets)
        ]
        for service, listening in zip(self.services, self.sockets, strict=True):
            stack.callback(listening.close)
            stack.callback(service.close)

    def view(self, epoch: int, *slots: int) -> View:
        """Return a view of these processes, the first of which serves it."""
        ports = [each.getsockname()[1] for each in self.sockets]
        members = tuple(ViewMember(slot, 0, 1, service_port=ports[slot]) for slot in slots)
        return View.make(epoch, [ViewHost("h", 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 8))

    def meet(self, view: View) -> list[PrefixRendezvous]:
        return [self.services[member.slot].meet(view, 30.0) for member in view.members]


@pytest.fixture
def members() -> Iterator[Members]:
    with ExitStack() as stack:
        yield Members(stack, 3)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Addresses and ranks of the connections that are made from now on."""
    made: list[tuple[str, int]] = []
    begin = RendezvousClient.__init__

    def note_and_begin(client: RendezvousClient, address: str, secret: bytes, rank: int, *more: object) -> None:
        made.append((address, rank))
        begin(client, address, secret, rank, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(RendezvousClient, "__init__", note_and_begin)
    return made


def exchange(rendezvous: list[PrefixRendezvous]) -> list[bytes]:
    """All of them tell each other their ranks, and need the connections no more."""
    for rank, each in enumerate(rendezvous):
        each.put(f"rank/{rank}", b"%d" % rank)
    found = [rendezvous[-1].get(f"rank/{rank}", 30.0) for rank in range(len(rendezvous))]
    for each in rendezvous:
        each.close()
    return found


def test_the_next_view_needs_no_new_connections(members: Members, connected: list[tuple[str, int]]) -> None:
    assert exchange(members.meet(members.view(1, 0, 1))) == [b"0", b"1"]
    assert len(connected) == 2
    newcomer = members.services[2]
    newcomer.connect(members.view(1, 0, 1))
    assert len(connected) == 3
    assert exchange(members.meet(members.view(2, 0, 1, 2))) == [b"0", b"1", b"2"]
    assert len(connected) == 3


def test_a_connection_made_ahead_waits_as_long_as_others_in_a_view(members: Members) -> None:
    exchange(members.meet(members.view(1, 0, 1)))
    newcomer = members.services[2]
    newcomer.connect(members.view(1, 0, 1))
    exchange(members.meet(members.view(2, 0, 1, 2)))
    assert newcomer._kept is not None
    assert newcomer._kept[1].timeout_seconds == 30.0


def test_a_forked_child_has_no_connection(members: Members) -> None:
    view = members.view(1, 0, 1)
    exchange(members.meet(view))
    kept = members.services[1]._kept
    assert kept is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if not kept[1].is_idle else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kept[1].is_idle


def test_another_rank_0_is_another_service(members: Members, connected: list[tuple[str, int]]) -> None:
    exchange(members.meet(members.view(1, 0, 1, 2)))
    view = members.view(2, 1, 2)
    assert exchange(members.meet(view)) == [b"0", b"1"]
    assert connected[3:] == [(view_service_address(view), 0), (view_service_address(view), 1)]


def test_a_connection_that_has_ended_is_not_used(members: Members, connected: list[tuple[str, int]]) -> None:
    view = members.view(1, 0, 1)
    exchange(members.meet(view))
    client = members.services[1]._kept[1]  # type: ignore[index]
    client._stream.socket.shutdown(socket.SHUT_RDWR)
    assert exchange(members.meet(members.view(2, 0, 1))) == [b"0", b"1"]
    assert len(connected) == 3


def test_who_cannot_connect_ahead_connects_with_the_others(members: Members, connected: list[tuple[str, int]]) -> None:
    members.services[2].connect(
        View.make(
            1,
            [ViewHost("h", 1, "127.0.0.1", (ViewMember(0, 0, 1, service_port=1),))],
            base=StepBase(),
            sizes=(1, 8),
        )
    )
    assert exchange(members.meet(members.view(2, 0, 2))) == [b"0", b"1"]
    assert len(connected) == 3


def test_nobody_waits_at_the_end_for_connections_that_are_kept(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = members.view(1, 0, 1)
    exchange(members.meet(view))
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    members.services[0].close()
    assert members.services[1]._take(view_service_address(view)) is None
