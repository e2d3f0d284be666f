"""Ranks connect their devices: the rendezvous of a process group, over the backend that they have in host memory.

That backend has checked who its peers are, has deadlines and knows the dead; so the library that connects the devices
needs no server, no port and no secret of its own to find the other ranks. How it works:

a. Every rank sends its device and its library (`rules.RankDeviceInfo`). If they do not go together, all
   ranks get the same `DeviceError`, and the job carries on.
b. Every rank lets a thread of its own connect (`Device.connect`), since that may wait for other ranks for as long as
   the library pleases. What the thread writes into the store is collected.
c. Meanwhile the ranks go through rounds, each an exchange over the host's backend: every rank sends what it has written
   since the round before, and whether it is connected. All ranks carry out what was written in rank order, so that all
   stores go through the same states: a number that several add to is the same for all.
d. The rounds end when all are connected; when one has failed (a `DeviceError` on all ranks that says which, and what
   others have made is aborted); when a rank has died, as the host's backend tells; or when the deadline of one has
   passed, which is an error on all of them that says who is not connected.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from reigen.backends.base import Backend
from reigen.backends.device.base import Device, DeviceGroup
from reigen.backends.device.rules import RankDeviceInfo, find_device_mismatch
from reigen.backends.device.store import ReplicatedStore, StoreWrite
from reigen.errors import DeadlineError, DeviceError

#: Seconds that a rank with nothing to send waits before the next round.
_ROUND_SECONDS = 0.01
#: Seconds after the deadline in which others may report that it has passed, and in which a cancelled thread may end
#: before it is left alone.
_GRACE_SECONDS = 1.0
_MOST_TEXT = 1000

Message = TypeVar("Message")


class ConnectRound(msgspec.Struct, frozen=True, array_like=True):
    """Message of a rank in a round: whether it is connected, or late, or why it failed, and its writes."""

    connected: bool
    late: bool
    failure: str
    writes: list[StoreWrite]


class _Attempt:
    """Attempt of one rank to connect, on a thread of its own."""

    def __init__(self, device: Device, rank: int, size: int) -> None:
        self.store = ReplicatedStore()
        self.failure = ""
        self._lock, self._is_abandoned = threading.Lock(), False
        self._group: DeviceGroup | None = None
        connect = partial(self._connect, device, rank, size)
        self._thread = threading.Thread(target=connect, name="reigen-connect", daemon=True)
        self._thread.start()

    @property
    def group(self) -> DeviceGroup | None:
        """Group that was made, once it is."""
        with self._lock:
            return self._group

    def _connect(self, device: Device, rank: int, size: int) -> None:
        try:
            group = device.connect(self.store, rank, size)
        except Exception as error:  # noqa: BLE001  whatever it is, all ranks have to know
            self.failure = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            return
        with self._lock:
            self._group = group
            is_abandoned = self._is_abandoned
        if is_abandoned:
            group.abort()

    def finish(self) -> DeviceGroup:
        """Return the group that was made, when all ranks have theirs."""
        self._thread.join()
        self.store.cancel("the ranks are connected, and none of them writes any more")
        assert self._group is not None
        return self._group

    def abandon(self, reason: str) -> None:
        """Give up: a group that is made, now or later, is aborted."""
        with self._lock:
            group, self._is_abandoned = self._group, True
        self.store.cancel(reason)
        if group is not None:
            group.abort()
        self._thread.join(_GRACE_SECONDS)


def connect_devices(host: Backend, ranks: Sequence[int], device: Device, deadline: float) -> DeviceGroup:
    """Connect the devices of a group of ranks, and return the group on all of them. Collective.

    ``host`` is the backend of the same ranks, ``ranks`` are their numbers in the job, ``device`` is this rank's.

    Raises:
        DeviceError: on every rank, if the devices do not go together, or one of them cannot be connected.
        DeadlineError: it takes longer.
        CollectiveError: as the backend tells.
    """
    fact = RankDeviceInfo(_host_id(), device.identity, device.name, device.library()[0])
    differing = find_device_mismatch(_exchange(host, fact, deadline))
    if differing is not None:
        raise _device_error(ranks, *differing)
    attempt = _Attempt(device, host.rank, host.size)
    try:
        _run_rounds(host, ranks, attempt, fact.library, deadline)
    except BaseException as error:
        attempt.abandon(f"the devices of other ranks cannot be connected: {error}")
        raise
    return attempt.finish()


def _run_rounds(host: Backend, ranks: Sequence[int], attempt: _Attempt, library: str, deadline: float) -> None:
    """Do steps c and d; return when all ranks are connected."""
    is_connected = False
    while True:
        writes = attempt.store.collect(0 if is_connected else _ROUND_SECONDS)
        is_connected = attempt.group is not None
        own = ConnectRound(is_connected, time.monotonic() >= deadline, attempt.failure, writes)
        rounds = _exchange(host, own, deadline + _GRACE_SECONDS)
        for rank, received in enumerate(rounds):
            attempt.store.apply(received.writes, own=rank == host.rank)
        failures = {rank: received.failure for rank, received in enumerate(rounds) if received.failure}
        if failures:
            raise _device_error(ranks, f"{library} cannot connect the ranks' devices", failures)
        missing = tuple(ranks[rank] for rank, received in enumerate(rounds) if not received.connected)
        if not missing:
            return
        if any(received.late for received in rounds):
            raise DeadlineError(
                f"{library} did not connect the ranks' devices in time: still at it are ranks {list(missing)} of "
                f"{list(ranks)} (NCCL_DEBUG=INFO shows more)",
                ranks=missing,
            )


def _device_error(ranks: Sequence[int], reason: str, texts: Mapping[int, str]) -> DeviceError:
    details = {ranks[member]: text for member, text in texts.items()}
    return DeviceError(reason, ranks=tuple(details), details=details)


def _exchange(host: Backend, message: Message, deadline: float) -> list[Message]:
    """Return the messages of all ranks, in their order."""
    own = np.frombuffer(msgspec.msgpack.encode(message), np.uint8)
    sizes = np.empty(host.size, np.int64)
    host.allgather(np.array([own.size], np.int64), [1] * host.size, sizes, deadline)
    counts = [int(size) for size in sizes]
    received = np.empty(sum(counts), np.uint8)
    host.allgather(own, counts, received, deadline)
    decoder = msgspec.msgpack.Decoder(type(message))
    return [decoder.decode(part.tobytes()) for part in np.split(received, np.cumsum(counts)[:-1])]


def _host_id() -> str:
    """Return the identity of this host as NCCL sees it."""
    if given := os.environ.get("NCCL_HOSTID"):
        return ascii(given)
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()} {boot}"
