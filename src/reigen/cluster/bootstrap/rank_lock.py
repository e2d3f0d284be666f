"""Lock of a rank: one process at a time is one.

Whatever a rank starts inherits the variables that make it a rank. If such a process calls ``init()``, too, it must get
an error, not its parent's place. So each process that joins writes itself down at the rendezvous, once for each rank,
and the first one holds the rank until its end. The one that comes after that end (``python a.py && python b.py``) is
the rank's next incarnation; each incarnation has a rendezvous of its own. Processes of several hosts may claim ranks at
one service, so a process is identified by its host, too. Whether one on another host has ended cannot be seen from
here, so it holds its rank for as long as the service lives.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import msgspec

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import ConfigError

_SHOWN_CHARACTERS = 200


class _RankHolder(msgspec.Struct, array_like=True, frozen=True):
    """Identity of a process among all that have had, or will have, its number.

    Attributes:
        pid: its number.
        started: when it was started, in clock ticks since the host was.
        host_id: identity of its host.
        host: the host's name.
    """

    pid: int
    started: int
    host_id: str
    host: str = ""


def claim_rank(rendezvous: Rendezvous, rank: int) -> int:
    """Become ``rank``. Repeating it changes nothing.

    Returns:
        How many processes have been this rank before, and have ended.

    Raises:
        ConfigError: another process is this rank.
    """
    own = _RankHolder(os.getpid(), int(read_process_stat(os.getpid())[19]), *host_identity())
    for incarnation in itertools.count():
        kept = rendezvous.put_first(f"process/{rank}/{incarnation}", msgspec.msgpack.encode(own))
        holder = msgspec.msgpack.decode(kept, type=_RankHolder)
        if holder == own:
            return incarnation
        if holder.host_id != own.host_id:
            raise ConfigError(
                f"rank {rank} of this job is process {holder.pid} of host {holder.host}, and process {own.pid} of host "
                f"{own.host} says that it is this rank, too. Each process needs its own rank: were the same "
                "variables set on both hosts, or a command started on both that was meant for one?"
            )
        if _is_running(holder):
            raise ConfigError(
                f"rank {rank} of this job is process {holder.pid}{_format_command(holder)}, which still runs. This "
                f"process, {own.pid}, was given the same rank. If it has inherited the environment of that one, it is "
                "no rank: what a rank starts must not call init(); to give it its own job, start it by `reigen run "
                "-np 1 COMMAND`, or without the variables REIGEN_*, HOROVOD_*, RANK and WORLD_SIZE. If both were "
                "started by hand, give each its own RANK."
            )
    raise AssertionError("incarnations are counted without end")


def _is_running(holder: _RankHolder) -> bool:
    fields = read_process_stat(holder.pid)
    return bool(fields) and int(fields[19]) == holder.started and fields[0] not in {"Z", "X"}


def read_process_stat(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat behind the process's name: its state, its parent, ...; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return []


def _format_command(holder: _RankHolder) -> str:
    try:
        fields = Path(f"/proc/{holder.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return f" ({' '.join(fields).strip()[:_SHOWN_CHARACTERS]})"
