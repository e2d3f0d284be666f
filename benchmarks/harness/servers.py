"""Jobs with parameter servers, for benchmarks: scheduler and servers are started here, workers belong to a crew."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.crew import START_SECONDS, Start
from reigen.cluster.environ import SECRET_VARIABLE
from reigen.net.auth import SECRET_BYTES

_END_SECONDS = 5.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Seat:
    """Where a process of a job runs.

    Attributes:
        address: at which the others find it.
        interface: the network interface that has this address.
        entry: the beginning of a command whose rest is run there.
        network: entered by this process to make sockets as if it were there.
    """

    address: str = "127.0.0.1"
    interface: str = "lo"
    entry: tuple[str, ...] = ()
    network: Callable[[], AbstractContextManager[None]] = nullcontext


def reigen_role(role: str) -> list[str]:
    """The command of Reigen's own scheduler or server."""
    return [sys.executable, "-m", "reigen", role]


@contextmanager
def parameter_servers(
    num_workers: int,
    scheduler: Seat,
    servers: Sequence[Seat],
    command: Callable[[str], list[str]] = reigen_role,
) -> Iterator[Mapping[str, str]]:
    """Start a scheduler and servers; when the block ends, those that have not left with their workers are ended.

    Args:
        num_workers: how many will come.
        scheduler: where it runs.
        servers: where each of them runs.
        command: of the role ("scheduler", "server") that it is given.

    Yields:
        The variables that all processes of the job have in common; see `worker_starts`.
    """
    with scheduler.network(), socket.create_server((scheduler.address, 0)) as holder:
        port = holder.getsockname()[1]
    common = {
        "DMLC_PS_ROOT_URI": scheduler.address,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(num_workers),
        "DMLC_NUM_SERVER": str(len(servers)),
        SECRET_VARIABLE: secrets.token_hex(SECRET_BYTES),
        "REIGEN_START_TIMEOUT": f"{START_SECONDS:g}",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        for number, seat in enumerate([scheduler, *servers]):
            role = "server" if number else "scheduler"
            process = subprocess.Popen(
                [*seat.entry, *command(role)],
                env=os.environ | common | _place(seat, role, max(number - 1, 0)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_end, process)
        yield common


def worker_starts(
    common: Mapping[str, str], workers: Sequence[Seat], prefix: tuple[str, ...] = ()
) -> tuple[Start, ...]:
    """How each worker is started.

    Args:
        common: from `parameter_servers`.
        workers: where each of them runs.
        prefix: what comes before the Python of a crew's command.
    """
    return tuple(
        Start((*seat.entry, *prefix), {**common, **_place(seat, "worker", number)})
        for number, seat in enumerate(workers)
    )


def _place(seat: Seat, role: str, number: int) -> dict[str, str]:
    place = {"DMLC_INTERFACE": seat.interface, "DMLC_NODE_HOST": seat.address}
    return {**place, "DMLC_ROLE": role, "DMLC_TASK_ID": str(number)}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what enters a machine, and what it has started there
        process.wait()
