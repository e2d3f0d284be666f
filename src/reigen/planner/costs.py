"""Costs of messages and bytes in the backends: one table, which a calibration file replaces."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reigen.errors import ArgumentError
from reigen.planner.json_files import JsonFormat
from reigen.planner.units import parse_number

_FORMAT = JsonFormat("calibration file", 1, "costs", dict, "`reigen bench costs --costs FILE` writes it")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds of one processor, unless a field says something else.

    Attributes:
        operation_seconds: a rank's part of a collective besides its data: submission, negotiation, execution.
        control_message_seconds: what rank 0 spends on a control message of another host's rank, sent or received.
        wakeup_seconds: from a message's arrival until a process that slept acts on it (delay, no processor is busy).
        barrier_seconds: until all ranks of a host know that all have come.
        device_hop_seconds: a message between two GPUs, besides the network's latency.
        shm_seconds_per_byte: adding up in shared memory: for each byte that is read.
        copy_seconds_per_byte: copying memory, and writing results, for each byte.
        tcp_message_seconds: one message of data, on the sender and on the receiver.
        tcp_send_seconds_per_byte, tcp_receive_seconds_per_byte: the kernel's and our part of moving a byte.
        reduce_seconds_per_byte: adding up what has arrived, for each byte that is read.
        wire_bytes_per_byte: bytes on the wire for a byte of data (headers of frames), no time.
        request_seconds: a worker's part of a push or pull of one shard, besides its bytes.
        server_request_seconds: a server's part of the same.
        server_update_seconds_per_byte: the optimizer's update on a server, for each byte of weights.
        update_scale: what the optimizer takes on a rank, relative to the profile's.
        encode_seconds_per_byte, decode_seconds_per_byte: of compression, for each byte of float32 values.
    """

    operation_seconds: float = 60e-6
    control_message_seconds: float = 10e-6
    wakeup_seconds: float = 50e-6
    barrier_seconds: float = 40e-6
    device_hop_seconds: float = 6e-6
    shm_seconds_per_byte: float = 0.1e-9
    copy_seconds_per_byte: float = 0.1e-9
    tcp_message_seconds: float = 15e-6
    tcp_send_seconds_per_byte: float = 0.2e-9
    tcp_receive_seconds_per_byte: float = 0.3e-9
    reduce_seconds_per_byte: float = 0.15e-9
    wire_bytes_per_byte: float = 1514 / 1448
    request_seconds: float = 30e-6
    server_request_seconds: float = 30e-6
    server_update_seconds_per_byte: float = 0.3e-9
    update_scale: float = 1.0
    encode_seconds_per_byte: float = 1.0e-9
    decode_seconds_per_byte: float = 0.5e-9
    #: where they come from; empty for the defaults
    source: str = field(default="", compare=False)


def read_costs(path: str | Path) -> Costs:
    """Read a calibration file (its format: `reigen.planner`).

    Raises:
        ArgumentError: it is none, is of another version, or a name or value in it is wrong.
        OSError: it cannot be read.
    """
    return make_costs(_FORMAT.read(path), str(path))


def make_costs(content: Any, path: str) -> Costs:
    """Return costs of a calibration file's content.

    Raises:
        ArgumentError: a name or a value is wrong.
    """
    content = _FORMAT.check(content, path)
    known = {each.name for each in dataclasses.fields(Costs)} - {"source"}
    unknown = sorted(set(content["costs"]) - known)
    if unknown:
        raise ArgumentError(f"{path}: there is no cost {unknown[0]!r}; there are {', '.join(sorted(known))}")
    values = {name: parse_number(value, f"{path}: {name}") for name, value in content["costs"].items()}
    source = " ".join(str(content[name]) for name in ("machine", "date") if content.get(name))
    return Costs(**values, source=source or path)
