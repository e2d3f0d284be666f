"""Messages for the user at the end of a job. Makes text, prints nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from reigen.launch.job_state import KILLED_EXIT_CODES, FinishJob, JobFailure, was_killed
from reigen.launch.output.line_prefix import ProcessNames, visible_text
from reigen.launch.ps_processes import FIRST_ELASTIC_NUMBER, SNAPSHOT_VARIABLE
from reigen.launch.supervision.process_tree import signal_name
from reigen.launch.supervision.watchdog import STOP_SIGNALS


@dataclass(frozen=True, slots=True)
class ProcessLocations:
    """Hosts and names of a job's processes, and hosts that were lost.

    Attributes:
        hosts: of each process, by number; empty where all are on one.
        names: of PS processes, by number.
        losses: hosts that were lost, and why.
        held_keys: keys that are lost in part with each server, by the server's number, in words.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    names: ProcessNames = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)
    held_keys: Mapping[int, str] = field(default_factory=dict)


#: The end of an elastic job whose processes have all ended with exit code 0 within it; the second one for horovodrun.
EARLY_END_TEXT = (
    "all processes have ended with exit code 0 before the job was done, as by sys.exit(): leave its loop by `break`, "
    "or return from its function, and let the program end behind it"
)
EARLY_SUCCESS_TEXT = "all processes have ended with exit code 0: the job is done, as for horovodrun"
#: Advice where the last lines of stderr match.
_HINTS = (
    (
        re.compile(rb"No module named 'horovod'$"),
        "`reigen run --as-horovod ...` runs scripts that import horovod; `python -m reigen.compat install` lets any",
    ),
    (
        re.compile(rb"DMLC_NUM_WORKER|USE_DIST_KVSTORE"),
        "`reigen run --as-mxnet -s SERVERS ...` runs scripts for MXNet's KVStore on Reigen's parameter servers",
    ),
)
#: Where the kernel counted no OOM kill: the counter of another control group may have.
SIGKILL_HINT = (
    "only the kernel and `kill -9` send SIGKILL: usually memory ran out (`dmesg -T | grep -i oom`, or the state of the"
    " container, shows it); smaller batches, fewer ranks on the host or fewer data loader workers need less"
)


def format_exit_report(
    finish: FinishJob,
    tail: Sequence[bytes],
    locations: ProcessLocations,
    *,
    is_above: bool = False,
    sharing: Sequence[int] = (),
) -> bytes:
    """Format the last message of a job: empty where all went well.

    Args:
        finish: how it ended.
        tail: the last lines of the stderr of the process that failed first.
        locations: of its processes.
        is_above: these lines were printed just before.
        sharing: ranks that ended with the same error.
    """
    failure = finish.failure
    if failure is None:
        is_stopped = finish.signum in STOP_SIGNALS
        return f"reigen run: stopped by {signal_name(finish.signum or 0)}\n".encode() if is_stopped else b""
    number, names = failure.rank, locations.names
    host = locations.hosts.get(number, "")
    if failure.reason:
        lost = _format_processes([each for each, where in locations.hosts.items() if where == host], names)
        block = [f"reigen run: host {host} was lost, with {lost}: {failure.reason}".encode()]
    else:
        where = f" (host {host})" if host else ""
        name = names.get(number, f"rank {number}")
        block = [f"reigen run: {name}{where} failed first: {describe_exit(failure.exit_code, failure.cause)}".encode()]
        if is_above:
            message = [*takewhile(lambda line: not line.startswith(b" "), reversed(tail))]
            block += [b"  its error is the last one above:", *(b"    " + line for line in reversed(message))]
        elif tail:
            block += [b"  the last lines of its stderr:", *(b"    " + visible_text(line) for line in tail)]
        else:
            block.append(b"  it wrote nothing to stderr")
        if failure.exit_code in KILLED_EXIT_CODES and not failure.cause:
            block.append(f"  {SIGKILL_HINT}".encode())
        if sharing:
            block.append(f"  {_format_processes(sharing, names)} ended with the same error".encode())
        block += [f"  {hint}".encode() for pattern, hint in _HINTS if any(map(pattern.search, tail))]
        if failure.num_restarts or number in names:
            failed_again = f"it was started again {_format_restarts(failure)}, and has failed again"
            block.append(b"  " + (_describe_restarts(name, failure) if number in names else failed_again).encode())
        if number in locations.held_keys:
            block.append(f"  lost with it are its parts of {locations.held_keys[number]}".encode())
    num_stopped = max(0, failure.num_stopped - len(sharing))
    if num_stopped:
        stopped = "rank was" if num_stopped == 1 else "ranks were"
        other = "" if number in names else "other "
        block.append(f"  {num_stopped} {other}{stopped} stopped because of it".encode())
    losses = [each for each in locations.losses.items() if not failure.reason or each[0] != host]
    block += [f"  host {lost_host} was lost: {why}".encode() for lost_host, why in losses]
    return b"\n".join(block) + b"\n"


def describe_exit(exit_code: int, cause: str = "") -> str:
    """Describe a process's exit code, and the kernel's cause of its end: ``killed by SIGKILL; CAUSE``."""
    text = f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal_name(-exit_code)}"
    return f"{text}; {cause}" if cause else text


def _describe_restarts(name: str, failure: JobFailure) -> str:
    if failure.num_restarts:
        return f"it had been started again {_format_restarts(failure)} before"
    if not was_killed(failure.exit_code):
        return "it was not started again: it has ended by itself"
    if failure.rank >= FIRST_ELASTIC_NUMBER and not name.startswith("server"):
        return "it was not started again: that of an elastic job cannot be replaced, and no worker could join any more"
    if name.startswith("server"):
        return (
            "it was not started again: a server is only where it keeps snapshots, in the memory of another one "
            f"(--replicate-servers 2) or on a disk ({SNAPSHOT_VARIABLE})"
        )
    return "it was not started again"


def _format_restarts(failure: JobFailure) -> str:
    return f"{failure.num_restarts} time{'s' if failure.num_restarts > 1 else ''}"


def _format_processes(numbers: Sequence[int], names: ProcessNames) -> str:
    """Format processes: ``ranks 1, 2 and server 0``."""
    ranks = [str(number) for number in numbers if number not in names]
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"] if ranks else []
    parts += [names[number] for number in numbers if number in names]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
