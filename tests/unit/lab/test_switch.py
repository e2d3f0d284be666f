"""The switch between stand-in machines, with a clock that stands still until it is told to go on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.lab import switch
from tests.lab.switch import Port, Switch

_PACKET_BYTES = 1000 - 14  # 1000 with the header of an Ethernet frame
_RATE_BITS = 8e6  # a packet takes 1 ms


class Wires:
    """A switch whose devices are sockets, and its time."""

    def __init__(self, num_ports: int, stack: ExitStack) -> None:
        self.now = 0.0
        self.switch = Switch(seed=0)
        self.ends = []
        for number in range(num_ports):
            device, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            stack.enter_context(device)
            stack.enter_context(end)
            device.setblocking(False)
            end.setblocking(False)
            port = Port(device.fileno(), rate_bits=_RATE_BITS)
            self.switch._ports.append(port)
            self.switch._by_address[bytes([10, 0, 0, number])] = port
            self.ends.append(end)

    def send(self, sender: int, receiver: int, mark: int) -> None:
        packet = bytearray(10 + _PACKET_BYTES)
        packet[10] = 0x45
        packet[26:30] = bytes([10, 0, 0, receiver])
        packet[-1] = mark
        self.ends[sender].send(packet)
        self.switch._receive(self.switch._ports[sender])

    def received(self, receiver: int, until: float) -> list[int]:
        """What comes up to then."""
        self.now = until
        self.switch._deliver()
        marks = []
        while True:
            try:
                marks.append(self.ends[receiver].recv(65536)[-1])
            except BlockingIOError:
                return marks


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wires]:
    with ExitStack() as stack:
        made = Wires(4, stack)
        monkeypatch.setattr(switch.time, "monotonic", lambda: made.now)
        yield made


def test_a_packet_does_not_wait_at_its_receiver_for_one_that_is_still_at_its_sender(wires: Wires) -> None:
    for mark in range(5):
        wires.send(0, 3, mark)
        wires.send(0, 2, mark)  # leaves 2, 4, 6, 8 and 10 ms from now
    wires.send(1, 2, 100)  # leaves 1 ms from now
    assert wires.received(2, 0.0015) == [100]
    assert wires.received(2, 0.0105) == [0, 1, 2, 3, 4]


def test_packets_that_come_together_pass_one_after_the_other(wires: Wires) -> None:
    for mark in range(3):
        wires.send(0, 2, mark)
        wires.send(1, 2, 10 + mark)
    came = [wires.received(2, 0.0005 + milliseconds / 1000) for milliseconds in range(8)]
    assert [len(marks) for marks in came] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert sorted(mark for marks in came for mark in marks) == [0, 1, 2, 10, 11, 12]


def test_what_would_wait_longer_than_the_queue_holds_is_dropped(wires: Wires) -> None:
    for mark in range(60):
        for sender in (0, 1, 2):
            wires.send(sender, 3, mark)
    num_came = sum(len(wires.received(3, milliseconds / 1000)) for milliseconds in range(1, 300))
    assert 159 <= num_came <= 161, "in 60 ms 180 came; 60 passed, and 100 waited"
