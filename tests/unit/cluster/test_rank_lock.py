"""Who is a rank: one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from reigen.cluster.bootstrap.rank_lock import claim_rank
from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.errors import ConfigError


def started(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@contextmanager
def held_by_a_child(rendezvous, rank):
    """A process that waits for the end of its input, as the holder of a rank."""
    with subprocess.Popen(
        [sys.executable, "-Sc", "input('here')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"here"  # before that, its command may not be known yet
        holder = [child.pid, started(child.pid), *host_identity()]
        rendezvous.put(f"process/{rank}/0", msgspec.msgpack.encode(holder))
        yield child


def test_the_first_process_holds_the_rank_and_may_come_again():
    rendezvous = LocalRendezvous()
    assert [claim_rank(rendezvous, 3) for _ in range(3)] == [0, 0, 0]
    assert claim_rank(rendezvous, 4) == 0


def test_another_process_is_refused_while_the_first_runs():
    rendezvous = LocalRendezvous()
    with held_by_a_child(rendezvous, 1) as child:
        with pytest.raises(ConfigError) as caught:
            claim_rank(rendezvous, 1)
        text = str(caught.value)
        assert (
            f"rank 1 of this job is process {child.pid} ({sys.executable} -Sc input('here')), which still runs" in text
        )
        assert f"This process, {os.getpid()}," in text
        assert "reigen run -np 1" in text
        assert claim_rank(rendezvous, 0) == 0


def test_after_its_end_the_next_process_is_the_next_life():
    rendezvous = LocalRendezvous()
    with held_by_a_child(rendezvous, 1) as child:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert claim_rank(rendezvous, 1) == 1  # it has ended, though nobody has asked how
    assert claim_rank(rendezvous, 1) == 1


def test_a_process_number_that_is_used_again_is_another_process():
    rendezvous = LocalRendezvous()
    rendezvous.put("process/0/0", msgspec.msgpack.encode([os.getpid(), started(os.getpid()) - 1, *host_identity()]))
    assert claim_rank(rendezvous, 0) == 1


def test_a_process_of_another_machine_cannot_be_looked_at():
    rendezvous = LocalRendezvous()
    rendezvous.put("process/0/0", msgspec.msgpack.encode([7, 1, "elsewhere", "h2"]))
    with pytest.raises(ConfigError) as caught:
        claim_rank(rendezvous, 0)
    assert f"rank 0 of this job is process 7 of host h2, and process {os.getpid()} of host" in str(caught.value)
