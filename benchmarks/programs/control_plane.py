"""A rank of `benchmarks.control_plane start`: where the time of its start goes, and what rank 0 does for each step.

CONTROL_PLANE_BEGAN is when the launcher was started, on the clock of ``time.monotonic()``, which all hosts share. Each
line on standard output is a JSON object: rank 0's figures, and of every rank when it learnt that another has died.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time

STARTED = time.monotonic()

import numpy as np  # noqa: E402  # the time of imports is a part of the start

import reigen  # noqa: E402
import reigen.context  # noqa: E402
import reigen.engine_factory as factory  # noqa: E402
from reigen import startup  # noqa: E402
from reigen.errors import CollectiveError  # noqa: E402
from reigen.net.connection import Connection  # noqa: E402
from reigen.net.tcp_star import TcpStarTransport  # noqa: E402

IMPORTED = time.monotonic()
NUM_TENSORS, NUM_STEPS = 16, 30
_PHASES = {
    "rendezvous": (reigen.context, startup, "join_rendezvous"),
    "membership": (factory, factory, "_create_membership"),
    "shared memory": (factory, factory, "_connect_local_peers"),
    "control connections": (factory, factory, "_connect_transport"),
    "data connections": (factory, factory, "compose_backend"),
}
_seconds = dict.fromkeys(_PHASES, 0.0)
_counts = {"messages_in": 0, "messages_out": 0, "bytes_in": 0, "bytes_out": 0}


def measure_phases() -> None:
    """Have the phases of init() take their times."""
    for phase, (user, home, name) in _PHASES.items():

        def timed(
            *args: object, phase: str = phase, original: object = getattr(home, name), **kwargs: object
        ) -> object:
            begin = time.monotonic()
            try:
                return original(*args, **kwargs)  # type: ignore[operator]
            finally:
                _seconds[phase] += time.monotonic() - begin

        for module in {user, home}:
            if hasattr(module, name):
                setattr(module, name, timed)


def count_messages() -> None:
    """Count what goes over the connections of this rank for control messages, and over no others."""
    transport = reigen.context.current()._engine._transport
    assert isinstance(transport, TcpStarTransport)
    ours = set(transport._ranks)
    post, read = Connection.post, Connection.read

    def counted_post(connection: Connection, message: bytes) -> None:
        if connection in ours:
            _counts["messages_out"] += 1
            _counts["bytes_out"] += len(message)
        post(connection, message)

    def counted_read(connection: Connection) -> list[bytes]:
        messages = read(connection)
        if connection in ours:
            _counts["messages_in"] += len(messages)
            _counts["bytes_in"] += sum(map(len, messages))
        return messages

    Connection.post = counted_post  # type: ignore[method-assign,assignment]
    Connection.read = counted_read  # type: ignore[method-assign,assignment]


def step(data: np.ndarray) -> None:
    """Small tensors, as gradients come: negotiation is nearly all of it."""
    handles = [reigen.allreduce_async(data, name=f"g{number}") for number in range(NUM_TENSORS)]
    for handle in handles:
        reigen.synchronize(handle)


def main() -> None:
    """Start, take steps, and see a rank die."""
    began = float(os.environ["CONTROL_PLANE_BEGAN"])
    measure_phases()
    reigen.init()
    joined, data = time.monotonic(), np.ones(16, np.float32)
    reigen.allreduce(data, name="first")
    first = time.monotonic()
    own = [STARTED - began, IMPORTED - STARTED, joined - IMPORTED, first - joined, *_seconds.values()]
    times = reigen.allgather(np.array([own]))
    step(data)
    count_messages()
    walls, before, cpu = [], dict(_counts), time.process_time()
    for _ in range(NUM_STEPS):
        begin = time.monotonic()
        step(data)
        walls.append(time.monotonic() - begin)
    cpu = time.process_time() - cpu
    if reigen.rank() == 0:
        names = ["launch", "import", "init", "first collective", *_PHASES]
        print(
            json.dumps(
                {
                    "ranks": reigen.size(),
                    "started_seconds": round(first - began, 2),
                    "phases_median": {
                        n: round(float(v), 2) for n, v in zip(names, np.median(times, axis=0), strict=True)
                    },
                    "phases_longest": {n: round(float(v), 2) for n, v in zip(names, times.max(axis=0), strict=True)},
                    "step_ms": round(1e3 * statistics.median(walls), 2),
                    "rank_0_cpu_ms_per_step": round(1e3 * cpu / NUM_STEPS, 2),
                    **{name: round((value - before[name]) / NUM_STEPS, 1) for name, value in _counts.items()},
                }
            ),
            flush=True,
        )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher would end the others before they can say a word
    reigen.barrier()
    if reigen.rank() == reigen.size() - 1:
        print(json.dumps({"killed": time.monotonic()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            reigen.allreduce(data, name="until one dies")
    except CollectiveError as error:
        print(json.dumps({"told": time.monotonic(), "ranks": error.ranks}), flush=True)
    reigen.shutdown()
    sys.exit(1)


if __name__ == "__main__":
    main()
