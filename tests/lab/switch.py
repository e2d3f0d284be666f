"""A switch between stand-in machines, run as a program: it reads and writes each machine's interface, a TUN device.

The kernel here need not have netem. Each packet leaves its sender's port when that has sent the ones before it, arrives
``delay`` later, and passes the receiver's port in the same way; what would wait longer than 100 ms is dropped, as by a
queue that is full. Packets may be up to 64 KiB of one TCP connection that the kernel has not yet cut (GSO): they are
counted as the packets that a network card would make of them.

Orders come as JSON, one a line, on standard input: ``{"attach": PID, "addresses": [..]}`` makes the next port, a device
``eth0`` in that process's network; ``{"port": N, "rate_bits": R, "delay_seconds": D, "loss": P, "up": true}`` changes
one. Each is answered by a line that is empty, or says what went wrong. The program ends when its input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import ipaddress
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_OFFLOAD_CHECKSUM_TCP4_TCP6 = 0x1 | 0x2 | 0x4
_VIRTIO_HEADER_BYTES = 10  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_ETHERNET_BYTES = 14
_QUEUE_SECONDS = 0.1
_LARGEST_PACKET_BYTES = 65535 + _VIRTIO_HEADER_BYTES
_PACKETS_A_TURN = 64


@dataclass
class Port:
    """One machine's place at the switch.

    Attributes:
        device: the TUN device.
        rate_bits: bits a second in each direction, None for no limit.
        delay_seconds: from this port to any other.
        loss: probability that a packet from here is dropped.
        up: whether the cable is plugged in.
        gone: the machine has ended.
        sent_until: when the last packet from here has left.
        received_until: when the last packet to here has arrived.
    """

    device: int
    rate_bits: float | None = None
    delay_seconds: float = 0.0
    loss: float = 0.0
    up: bool = True
    gone: bool = False
    sent_until: float = 0.0
    received_until: float = 0.0


class Switch:
    """The ports, and the packets on their way."""

    def __init__(self, seed: int) -> None:
        self._ports: list[Port] = []
        self._by_address: dict[bytes, Port] = {}
        #: by the time of what happens next: a packet reaches its receiver's port (and is as long as this many bits),
        #: or has passed it (None)
        self._flying: list[tuple[float, int, Port, int | None, bytes]] = []
        self._num_packets = 0
        self._random = random.Random(seed)

    def obey(self, order: dict[str, object]) -> None:
        """Makes or changes a port."""
        if "attach" in order:
            device = open_tun(int(str(order["attach"])))
            self._ports.append(Port(device))
            addresses = order["addresses"]
            assert isinstance(addresses, list)
            for address in addresses:
                self._by_address[ipaddress.ip_address(address).packed] = self._ports[-1]
            return
        number = order.pop("port")
        assert isinstance(number, int)
        port = self._ports[number]
        for name, value in order.items():
            setattr(port, name, value)
        # Lost packets are single ones, not everything that the kernel would have cut later.
        if not port.gone:
            fcntl.ioctl(port.device, _TUNSETOFFLOAD, 0 if port.loss else _OFFLOAD_CHECKSUM_TCP4_TCP6)

    def run(self) -> None:
        """Until the input ends."""
        lines = bytearray()
        while True:
            devices = {port.device: port for port in self._ports if not port.gone}
            wait = max(0.0, self._flying[0][0] - time.monotonic()) if self._flying else None
            ready, _, _ = select.select([0, *devices], [], [], wait)
            for descriptor in ready:
                if descriptor:
                    self._receive(devices[descriptor])
                    continue
                if not (data := os.read(0, 65536)):
                    return
                lines += data
                *whole, lines = lines.split(b"\n")
                for line in whole:
                    self._answer(bytes(line))
            self._deliver()

    def _answer(self, line: bytes) -> None:
        try:
            self.obey(json.loads(line))
            answer = ""
        except OSError as error:
            answer = str(error)
        os.write(1, answer.encode() + b"\n")

    def _receive(self, port: Port) -> None:
        for _ in range(_PACKETS_A_TURN):
            try:
                packet = os.read(port.device, _LARGEST_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the machine is gone
                port.gone = True
                return
            self._plan(port, packet)

    def _plan(self, sender: Port, packet: bytes) -> None:
        receiver = self._by_address.get(destination(packet))
        if receiver is None or not (sender.up and receiver.up):
            return
        if sender.loss and self._random.random() < sender.loss:
            return
        now = time.monotonic()
        num_bits = 8 * num_wire_bytes(packet)
        sent = max(now, sender.sent_until) + (num_bits / sender.rate_bits if sender.rate_bits else 0.0)
        if sent > now + _QUEUE_SECONDS:
            return
        sender.sent_until = sent
        self._fly(sent + sender.delay_seconds, receiver, num_bits, packet)

    def _fly(self, until: float, receiver: Port, num_bits: int | None, packet: bytes) -> None:
        self._num_packets += 1
        heapq.heappush(self._flying, (until, self._num_packets, receiver, num_bits, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            reached, _, port, num_bits, packet = heapq.heappop(self._flying)
            if num_bits is not None:
                self._pass(port, reached, num_bits, packet)
            elif port.up:
                try:
                    os.write(port.device, packet)
                except OSError:  # the machine is gone, or its interface is down
                    continue

    def _pass(self, receiver: Port, reached: float, num_bits: int, packet: bytes) -> None:
        """Let a packet that has reached its receiver's port pass it, behind those that have reached it before.

        Not behind those that were sent before: they may still wait for their turn at another sender's port.
        """
        arrived = reached
        if receiver.rate_bits:
            arrived = max(reached, receiver.received_until + num_bits / receiver.rate_bits)
        if arrived <= reached + _QUEUE_SECONDS:
            receiver.received_until = arrived
            self._fly(arrived, receiver, None, packet)


def destination(packet: bytes) -> bytes:
    """The address that a packet is for, packed."""
    version = packet[_VIRTIO_HEADER_BYTES] >> 4
    start = _VIRTIO_HEADER_BYTES + (16 if version == 4 else 24)
    return packet[start : start + (4 if version == 4 else 16)]


def num_wire_bytes(packet: bytes) -> int:
    """What a packet would take on an Ethernet, once cut to what that carries."""
    segment_bytes = int.from_bytes(packet[4:6], sys.byteorder)
    start = _VIRTIO_HEADER_BYTES
    size = len(packet) - start
    if not packet[1] or not segment_bytes:
        return size + _ETHERNET_BYTES
    # Only TCP is left uncut. hdr_len is no help: it tells how much of the packet lies in one piece.
    ip_bytes = (packet[start] & 15) * 4 if packet[start] >> 4 == 4 else 40
    header_bytes = ip_bytes + (packet[start + ip_bytes + 12] >> 4) * 4
    num_segments = -(-(size - header_bytes) // segment_bytes)
    return size - header_bytes + num_segments * (header_bytes + _ETHERNET_BYTES)


def open_tun(pid: int) -> int:
    """A new device ``eth0`` in the network of a process."""
    with network_of(pid):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM_TCP4_TCP6)
    return device


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """What this thread opens meanwhile is in the network of another process, and stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as ours, Path(f"/proc/{pid}/ns/net").open() as theirs:
        _set_network(libc, theirs.fileno())
        try:
            yield
        finally:
            _set_network(libc, ours.fileno())


def _set_network(libc: ctypes.CDLL, descriptor: int) -> None:
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


if __name__ == "__main__":
    Switch(int(sys.argv[1])).run()
