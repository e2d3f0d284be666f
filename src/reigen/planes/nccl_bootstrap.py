"""What ranks tell each other before they make a communicator, over the data plane that they have in host memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError, DeviceError
from reigen.planes.base import DataPlane
from reigen.planes.device import Device
from reigen.planes.nccl_library import Nccl
from reigen.planes.nccl_rules import Fact, disagreement

#: A fact, or an id or an excuse, in bytes: messages are of one size, which all ranks know.
_MESSAGE_BYTES = 512
_MOST_TEXT = 100
_FACT = msgspec.msgpack.Decoder(Fact)


def introduce(host: DataPlane, ranks: Sequence[int], device: Device, nccl: Nccl, deadline: float) -> None:
    """Every rank tells which device and which NCCL it uses. Collective.

    Args:
        host: the data plane of the same ranks.
        ranks: how the job numbers them.
        device: this rank's.
        nccl: this rank's.
        deadline: until when the others may come.

    Raises:
        DeviceError: on every rank, if the devices do not go together.
        CollectiveError: as the plane tells.
    """
    fact = Fact(_host_id(), device.identity[:_MOST_TEXT], device.name[:_MOST_TEXT], nccl.version)
    told = np.empty(host.size * _MESSAGE_BYTES, np.uint8)
    host.allgather(_framed(msgspec.msgpack.encode(fact)), [_MESSAGE_BYTES] * host.size, told, deadline)
    facts = [_FACT.decode(_unframed(one)) for one in told.reshape(host.size, _MESSAGE_BYTES)]
    differing = disagreement(facts)
    if differing is not None:
        reason, said = differing
        details = {ranks[member]: text for member, text in said.items()}
        raise DeviceError(reason, ranks=tuple(details), details=details)


def share_id(host: DataPlane, ranks: Sequence[int], nccl: Nccl, deadline: float) -> bytes:
    """The unique id for a communicator of these ranks, made by the first of them. Collective.

    Raises:
        DeviceError: on every rank, if NCCL gives none.
        CollectiveError: as the plane tells.
    """
    message, own = np.zeros(_MESSAGE_BYTES, np.uint8), None
    if host.rank == 0:
        try:
            own = _framed(b"1" + nccl.unique_id())
        except CollectiveError as error:
            own = _framed(b"0" + str(error).encode()[: _MESSAGE_BYTES // 2])
    host.broadcast(own, message, 0, deadline)
    said = _unframed(message)
    if said[:1] != b"1":
        raise DeviceError(said[1:].decode(errors="replace"), ranks=ranks[:1])
    return said[1:]


def _host_id() -> str:
    """What NCCL takes for the identity of a host."""
    given = os.environ.get("NCCL_HOSTID")
    if given:
        return ascii(given)[:_MOST_TEXT]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{platform.node()[:_MOST_TEXT]} {boot}"


def _framed(data: bytes) -> NDArray[np.uint8]:
    """With its length, in a message of fixed size."""
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    message[:2] = np.frombuffer(len(data).to_bytes(2, "little"), np.uint8)
    message[2 : 2 + len(data)] = np.frombuffer(data, np.uint8)
    return message


def _unframed(message: NDArray[np.uint8]) -> bytes:
    length = int.from_bytes(message[:2].tobytes(), "little")
    return message[2 : 2 + length].tobytes()
