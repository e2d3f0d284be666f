"""Memory of a host's voter: processes share it, die in the middle of a write, or are stopped while they have it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from reigen.cluster.membership.elastic import voter_memory
from reigen.cluster.membership.elastic.process_identity import LocalProcess
from reigen.cluster.membership.elastic.voter_memory import SLOT_BYTES, VoterMemory
from reigen.cluster.membership.views.messages import (
    AcceptView,
    Ballot,
    BallotPreempted,
    PrepareView,
    ViewAccepted,
    ViewDecided,
    ViewPromise,
)
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember
from reigen.errors import ConfigError, DeadlineError, WireError


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("voter")
    os.ftruncate(number, 128 << 10)
    yield number
    os.close(number)


def make_view(memory: VoterMemory, epoch: int = 1, size: int = 2) -> View:
    members = tuple(ViewMember(slot, 0, 1, 1000 + slot) for slot in range(size))
    return View.make(epoch, [ViewHost(*memory.id, "127.0.0.1", members)], base=StepBase(), sizes=(1, size))


@contextmanager
def child(work: str, fd: int) -> Iterator[int]:
    """A forked process that does something with the memory, tells that, and waits until it is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            memory = VoterMemory(fd, "a")
            if work == "lock":
                memory._set_lock(fcntl.F_WRLCK)
                os.pwrite(memory._fd, voter_memory._HOLDER.pack(os.getpid(), LocalProcess.current().started), 0)
            os.write(writing, b"!")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!"
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_one_voter_whoever_answers(fd: int) -> None:
    with closing(VoterMemory(fd, "a")) as one, closing(VoterMemory(fd, "a")) as other:
        assert one.id == other.id
        assert abs(one.id.incarnation / 1e6 - time.time()) < 60, "later than that of any memory before"
        view = make_view(one)
        assert one.handle(ViewDecided(1, view)) is None
        assert isinstance(one.handle(PrepareView(2, Ballot(5, 0))), ViewPromise)
        assert isinstance(other.handle(PrepareView(2, Ballot(4, 1))), BallotPreempted)
        following = make_view(one, 2, 1)
        assert isinstance(other.handle(AcceptView(2, Ballot(5, 0), following)), ViewAccepted)
        promise = one.handle(PrepareView(2, Ballot(6, 1)))
        assert isinstance(promise, ViewPromise)
        assert (promise.accepted, promise.value) == (Ballot(5, 0), following)


def test_largest_views_have_room(fd: int) -> None:
    with closing(VoterMemory(fd, "a")) as memory:
        memory.handle(ViewDecided(1, make_view(memory, 1, 1024)))
        assert isinstance(memory.handle(AcceptView(2, Ballot(1, 0), make_view(memory, 2, 1024))), ViewAccepted)


def test_write_that_a_death_has_cut_off_is_none(fd: int) -> None:
    with closing(VoterMemory(fd, "a")) as memory:
        memory.handle(ViewDecided(1, make_view(memory)))
        memory.handle(PrepareView(2, Ballot(1, 0)))  # the third write, to slot 1
        os.pwrite(fd, b"\xff" * 20, 4096 + SLOT_BYTES + 16)
        # what was promised last is lost with the slot, as if it had never been written: nothing was answered
        assert isinstance(memory.handle(PrepareView(2, Ballot(0, 0))), ViewPromise)


def test_damaged_memory_does_not_vote(fd: int) -> None:
    with closing(VoterMemory(fd, "a")) as memory:
        memory.handle(ViewDecided(1, make_view(memory)))
        for slot in range(2):
            os.pwrite(fd, b"\xff" * 20, 4096 + slot * SLOT_BYTES + 16)
        with pytest.raises(WireError, match="damaged"):
            memory.handle(PrepareView(2, Ballot(1, 0)))
        os.ftruncate(fd, 0)
        with pytest.raises(WireError, match="emptied"):
            memory.handle(PrepareView(2, Ballot(1, 0)))


def test_lock_ends_with_its_process(fd: int) -> None:
    with closing(VoterMemory(fd, "a")) as memory:
        memory.handle(ViewDecided(1, make_view(memory)))
        with child("lock", fd) as pid:
            os.kill(pid, signal.SIGKILL)
            assert isinstance(memory.handle(PrepareView(2, Ballot(1, 0))), ViewPromise)


def test_process_that_is_stopped_with_the_lock_is_killed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voter_memory, "_LOCK_SECONDS", 0.1)
    with closing(VoterMemory(fd, "a")) as memory:
        memory.handle(ViewDecided(1, make_view(memory)))
        with child("lock", fd) as pid:
            os.kill(pid, signal.SIGSTOP)
            pidfd = os.pidfd_open(pid)
            with pytest.raises(DeadlineError, match=f"process {pid} has kept the voter"):
                memory.handle(PrepareView(2, Ballot(1, 0)))
            assert select.select([pidfd], [], [], 10)[0], "it was killed"
            os.close(pidfd)
            assert isinstance(memory.handle(PrepareView(2, Ballot(1, 0))), ViewPromise)


def test_wrong_descriptors(fd: int) -> None:
    with pytest.raises(ConfigError, match="REIGEN_VOTER_FD"):
        VoterMemory(1_000_000, "a")
    VoterMemory(fd, "a").close()
    with pytest.raises(ConfigError, match="that of host 'a', not of 'b'"):
        VoterMemory(fd, "b")


def test_later_process_with_the_same_number_is_another_one() -> None:
    me = LocalProcess.current()
    pidfd = me.open()
    assert pidfd is not None
    os.close(pidfd)
    assert LocalProcess(me.pid, me.started + 1).open() is None
    assert LocalProcess((1 << 22) + 1, me.started).open() is None
