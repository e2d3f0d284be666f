"""A job on stand-in machines that the test starts by itself, to see what each rank says when something fails."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from reigen.cluster.environ import RANK_VARIABLES, RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.topology import Topology
from reigen.net.auth import SECRET_BYTES
from reigen.net.tls import TlsContext
from tests.lab import Host, HostProcess, Hosts
from tests.network.waiting import wait_for

PROGRAM = Path(__file__).with_name("rank.py")
SOURCE = Path(__file__).parents[2] / "src"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PEER_TIMEOUT_SECONDS = 2.0


class Rank:
    """One rank: where it runs, and what it tells."""

    def __init__(self, number: int, host: Host, process: HostProcess) -> None:
        self.number, self.host, self.process = number, host, process
        self.ended_at: float | None = None

    def events(self) -> list[dict[str, Any]]:
        whole, _, _ = self.process.output()[0].rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def has_told(self, event: str, times: int = 1) -> bool:
        """Whether it has; fails if it ends without."""
        ended = self.process.returncode is not None
        told = sum(each["event"] == event for each in self.events()) >= times
        assert told or not ended, f"rank {self.number} has ended: {self.process.output()}"
        return told

    def has_ended(self) -> bool:
        if self.process.returncode is None:
            return False
        self.ended_at = self.ended_at or time.monotonic()
        return True

    @property
    def error(self) -> dict[str, Any]:
        """The error that it ended with; fails if there is none, or more than that."""
        out, err = self.process.output()
        code = self.process.returncode
        assert code == 3, f"rank {self.number}: {code}, {out[-500:]}, {err[-3000:]}"
        assert "Traceback" not in err, err
        last = self.events()[-1]
        assert last["event"] == "error"
        return last


class Job:
    """Ranks on machines, consecutive ones side by side.

    Args:
        hosts: the machines.
        arguments: of ``rank.py``.
        launcher: variables that say who started the ranks, besides their places: see `ours` and `foreign`.
        ranks_a_host: how many.
        env: variables of all ranks.
        env_of: those of single ranks.
        before_of: what single ranks' commands begin with.
    """

    def __init__(
        self,
        hosts: Hosts,
        arguments: Sequence[str | Path],
        launcher: Mapping[str, str],
        *,
        ranks_a_host: int = 1,
        env: Mapping[str, str] | None = None,
        env_of: Mapping[int, Mapping[str, str]] | None = None,
        before_of: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.hosts = hosts
        self._others = {pid for host in hosts for pid in host.processes()}
        self.ranks: list[Rank] = []
        size = len(hosts) * ranks_a_host
        for number in range(size):
            cross, local = divmod(number, ranks_a_host)
            place = Topology(number, size, local, ranks_a_host, cross, len(hosts))
            names = RANK_VARIABLES if RENDEZVOUS_VARIABLE in launcher else _TORCHRUN_VARIABLES
            environ = {**launcher, **dict(zip(names, map(str, astuple(place)), strict=False))}
            environ |= {"PYTHONPATH": str(SOURCE), "REIGEN_PEER_TIMEOUT": str(PEER_TIMEOUT_SECONDS)}
            environ |= {"REIGEN_START_TIMEOUT": "60", **(env or {}), **(env_of or {}).get(number, {})}
            before = (before_of or {}).get(number, ())
            process = hosts[cross].start([*before, sys.executable, PROGRAM, *arguments], env=environ, has_input=True)
            self.ranks.append(Rank(number, hosts[cross], process))

    def wait_until(self, event: str, times: int = 1, timeout: float = 60.0) -> None:
        """All ranks have told of an event so many times."""
        wait_for(lambda: all(rank.has_told(event, times) for rank in self.ranks), f"{event} on all ranks", timeout)

    def finish(self, timeout: float, *, but: Collection[int] = ()) -> list[Rank]:
        """All ranks ``but`` some end in time; afterwards nothing is left of them on any machine. Those that ended."""
        ranks = [rank for rank in self.ranks if rank.number not in but]
        left = [rank.number for rank in ranks]

        def ended() -> bool:
            left[:] = [rank.number for rank in ranks if not rank.has_ended()]
            return not left

        try:
            wait_for(ended, "all ranks to end", timeout)
        except AssertionError:
            raise AssertionError(f"ranks {left} have not ended within {timeout:g} s: {self.describe()}") from None
        kept = set(self._others)
        kept |= {self.ranks[number].process.pid for number in but if not self.ranks[number].has_ended()}
        for host in self.hosts:
            wait_for(lambda host=host: not host.processes().keys() - kept, f"{host.name}: {host.processes()}")
        return ranks

    def succeeds(self, timeout: float = 120.0) -> None:
        """All ranks do what they were asked for, and nothing is left of them."""
        for rank in self.finish(timeout):
            assert [rank.process.returncode, *rank.events()[-1:]] == [0, {"event": "done"}], self.describe()

    def describe(self) -> str:
        return "\n".join(f"rank {rank.number}: {rank.process.output()}"[-3000:] for rank in self.ranks)


@contextlib.contextmanager
def ours(
    host: Host, address: str = "", tls: TlsContext | None = None, peer_timeout_seconds: float = PEER_TIMEOUT_SECONDS
) -> Iterator[dict[str, str]]:
    """The variables of a job whose launcher hosts the control service on a machine, as `reigen run` does."""
    secret = secrets.token_bytes(SECRET_BYTES)
    with host.network():
        server = ControlService(secret, address or host.address, peer_timeout_seconds=peer_timeout_seconds, tls=tls)
    server.start()
    try:
        yield {RENDEZVOUS_VARIABLE: server.address, SECRET_VARIABLE: secret.hex()}
    finally:
        server.close()


def foreign(host: Host) -> dict[str, str]:
    """Those of a job that somebody else has started, as torchrun does: rank 0, on this machine, hosts the service."""
    secret = secrets.token_bytes(SECRET_BYTES)
    return {SECRET_VARIABLE: secret.hex(), "MASTER_ADDR": host.address, "MASTER_PORT": "29500"}
