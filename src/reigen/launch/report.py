"""What the user is told at the end of a job. Makes text, prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reigen.launch.guard import STOP_SIGNALS
from reigen.launch.job import Failure, Finish, was_killed
from reigen.launch.output import Names, visible
from reigen.launch.processes import signal_name
from reigen.launch.servants import SNAPSHOT_VARIABLE


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What was where, and what became of the hosts.

    Attributes:
        hosts: of each process, by number; empty where all are on one.
        names: of processes that are no ranks, by number.
        losses: hosts that were lost, and why.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    names: Names = field(default_factory=dict)
    losses: Mapping[str, str] = field(default_factory=dict)


def report(finish: Finish, tail: Sequence[bytes], whereabouts: Whereabouts) -> bytes:
    """The last words of a job: nothing where all went well.

    Args:
        finish: how it ended.
        tail: the last lines of the stderr of the process that failed first.
        whereabouts: where that was.
    """
    if finish.failure is not None:
        host = whereabouts.hosts.get(finish.failure.rank, "")
        words = last_words(finish.failure, tail, whereabouts)
        others = [each for each in whereabouts.losses.items() if not finish.failure.reason or each[0] != host]
        return words + b"".join(f"  host {name} was lost: {why}\n".encode() for name, why in others)
    if finish.signum in STOP_SIGNALS:
        return f"reigen run: stopped by {signal_name(finish.signum)}\n".encode()
    return b""


def ended(exit_code: int) -> str:
    """How a process has ended.

    Example:
        >>> ended(3), ended(-9)
        ('exit code 3', 'killed by SIGKILL')
    """
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal_name(-exit_code)}"


def last_words(failure: Failure, tail: Sequence[bytes], whereabouts: Whereabouts) -> bytes:
    """The block that is printed last: who failed first, how, and its last words.

    Args:
        failure: what happened.
        tail: the last lines of that process's stderr.
        whereabouts: where it was.
    """
    number, names = failure.rank, whereabouts.names
    host = whereabouts.hosts.get(number, "")
    if failure.reason:
        lost = _listed([each for each, where in whereabouts.hosts.items() if where == host], names)
        block = [f"reigen run: host {host} was lost, with {lost}: {failure.reason}".encode()]
    else:
        where = f" (host {host})" if host else ""
        name = names.get(number, f"rank {number}")
        block = [f"reigen run: {name}{where} failed first: {ended(failure.exit_code)}".encode()]
        if tail:
            block += [b"  the last lines of its stderr:", *(b"    " + visible(line) for line in tail)]
        else:
            block.append(b"  it wrote nothing to stderr")
        if failure.num_restarts or number in names:
            block.append(b"  " + _of_restarts(name, failure).encode())
    if failure.num_stopped:
        others = "rank was" if failure.num_stopped == 1 else "ranks were"
        other = "" if number in names else "other "
        block.append(f"  {failure.num_stopped} {other}{others} stopped because of it".encode())
    return b"\n".join(block) + b"\n"


def _of_restarts(name: str, failure: Failure) -> str:
    if failure.num_restarts:
        return f"it had been started again {failure.num_restarts} time{'s' if failure.num_restarts > 1 else ''} before"
    if not was_killed(failure.exit_code):
        return "it was not started again: it has ended by itself"
    if name.startswith("server"):
        return f"it was not started again: a server is only where it keeps snapshots ({SNAPSHOT_VARIABLE})"
    return "it was not started again"


def _listed(numbers: Sequence[int], names: Names) -> str:
    """``ranks 1, 2 and server 0``."""
    ranks = [str(number) for number in numbers if number not in names]
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"] if ranks else []
    parts += [names[number] for number in numbers if number in names]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
