"""The witness: any member answers for it, and no two get answers that contradict each other."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reigen.cluster.membership.elastic.witness import (
    DirectoryRegister,
    RendezvousRegister,
    WitnessRegister,
    WitnessThread,
    WitnessVoter,
    check_witness_directory,
    make_witness,
    witness_directory,
)
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.cluster.membership.views.messages import (
    AcceptView,
    Ballot,
    BallotPreempted,
    BehindView,
    PrepareView,
    ViewAccepted,
    ViewDecided,
    ViewPromise,
)
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember, VoterId, Witness
from reigen.errors import ConfigError

MakeVoter = Callable[[], WitnessVoter]


@pytest.fixture(params=["directory", "launcher"])
def voter(request: pytest.FixtureRequest, tmp_path: Path) -> MakeVoter:
    if request.param == "directory":
        return lambda: WitnessVoter(DirectoryRegister(tmp_path))
    shared = LocalRendezvous()
    return lambda: WitnessVoter(RendezvousRegister(shared), num_mark_bytes=8)


def view(epoch: int, witness: VoterId, num_hosts: int = 2) -> View:
    hosts = [ViewHost(f"h{n}", 1, "127.0.0.1", (ViewMember(n, 0, 1),)) for n in range(num_hosts)]
    return View.make(epoch, hosts, base=StepBase(), sizes=(1, 8), witness=Witness(*witness, ""))


def test_it_is_one_acceptor_whoever_asks(voter: MakeVoter):
    one, two = voter(), voter()
    first = view(1, one.id)
    assert two.id == one.id
    assert one.handle(PrepareView(2, Ballot(1, 0)))[1] == BehindView(2, 0)
    one.handle(ViewDecided(1, first))
    assert isinstance(two.handle(PrepareView(2, Ballot(2, 1)))[1], ViewPromise)
    assert isinstance(one.handle(PrepareView(2, Ballot(1, 0)))[1], BallotPreempted)
    value = view(2, one.id)
    assert isinstance(two.handle(AcceptView(2, Ballot(2, 1), value))[1], ViewAccepted)
    promise = one.handle(PrepareView(2, Ballot(3, 0)))[1]
    assert isinstance(promise, ViewPromise)
    assert promise.value == value
    two.handle(ViewDecided(2, value))
    assert one.handle(PrepareView(2, Ballot(9, 0)))[1] == ViewDecided(2, value)


def test_who_has_lost_its_memory_votes_no_more_in_that_view(voter: MakeVoter):
    one = voter()
    forgotten = view(1, VoterId(one.id.name, one.id.incarnation - 1))
    one.handle(ViewDecided(1, forgotten))
    assert one.handle(PrepareView(2, Ballot(1, 0))) == (one.id, ViewDecided(1, forgotten)), (
        "no promise, but its new life"
    )


class Slow:
    """A register whose user is stopped between reading and creating, once."""

    def __init__(self, register: WitnessRegister, meanwhile: Callable[[], object]) -> None:
        self._register, self._meanwhile = register, meanwhile

    def latest(self) -> tuple[int, bytes]:
        return self._register.latest()

    def create(self, number: int, state: bytes) -> bool:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        return self._register.create(number, state)

    def empty(self, number: int) -> None:
        self._register.empty(number)


@pytest.mark.parametrize("num_states", [1, 3, 40])
def test_who_was_stopped_before_it_created_a_state_does_not_believe_in_it(tmp_path: Path, num_states: int):
    """Also when so many states were made meanwhile that the one it is about to make was dropped long ago."""
    register = DirectoryRegister(tmp_path)
    quick = WitnessVoter(register)
    quick.handle(ViewDecided(1, view(1, quick.id)))

    def others() -> None:
        for attempt in range(num_states):
            assert isinstance(quick.handle(PrepareView(2, Ballot(10 + attempt, 1)))[1], ViewPromise)

    slow = WitnessVoter(Slow(register, others))
    assert isinstance(slow.handle(PrepareView(2, Ballot(1, 0)))[1], BallotPreempted)
    whole = [file for file in tmp_path.iterdir() if file.stat().st_size]
    assert len(whole) <= 10


def test_many_at_a_time_decide_one_value(voter: MakeVoter):
    """Leaders of two hosts with a quorum of their own host and the witness: one value is accepted at most."""
    for seed in range(2):
        decided: list[View] = []
        first = voter()
        base = 100 * (seed + 1)
        first.handle(ViewDecided(base, view(base, first.id)))
        threads = [
            threading.Thread(target=lead, args=(voter(), base + 1, rank, random.Random(seed * 10 + rank), decided))
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert decided
        assert len({each.size for each in decided}) == 1, decided


def lead(voter: WitnessVoter, epoch: int, rank: int, chances: random.Random, decided: list[View]) -> None:
    """Propose a view of a size of its own, until one is accepted."""
    attempt = 1
    while not decided or chances.random() < 0.7:
        ballot = Ballot(attempt, rank)
        reply = voter.handle(PrepareView(epoch, ballot))[1]
        if isinstance(reply, ViewPromise):
            value = reply.value or view(epoch, voter.id, num_hosts=rank + 2)
            reply = voter.handle(AcceptView(epoch, ballot, value))[1]
            if isinstance(reply, ViewAccepted):
                decided.append(value)
        attempt += 1 + chances.randrange(3)


def test_a_directory_that_is_away_keeps_nobody_waiting(tmp_path: Path):
    replies: list[object] = []
    came = threading.Event()
    voter = WitnessVoter(DirectoryRegister(tmp_path / "missing"))
    thread = WitnessThread(voter, lambda _, reply: (replies.append(reply), came.set()))
    try:
        thread.ask(PrepareView(2, Ballot(1, 0)))
        (tmp_path / "missing").mkdir()
        while not came.wait(0.05):
            thread.ask(PrepareView(2, Ballot(1, 0)))
    finally:
        thread.close()
    assert replies[0] == BehindView(2, 0)


def test_what_the_launcher_may_name(tmp_path: Path):
    secret = b"s" * 32
    assert make_witness("", secret, LocalRendezvous) is None
    assert make_witness("launcher", secret, LocalRendezvous) is not None
    made = make_witness(f"dir:{tmp_path}", secret, LocalRendezvous)
    assert made is not None
    assert made.id == WitnessVoter(DirectoryRegister(witness_directory(str(tmp_path), secret))).id
    other = make_witness(f"dir:{tmp_path}", b"t" * 32, LocalRendezvous)  # another job
    assert other is not None
    assert other.id != made.id
    for spec, words in (("dir:relative", "--witness"), ("x", "--witness"), (f"dir:{tmp_path}/no", "no such directory")):
        with pytest.raises(ConfigError, match=words):
            make_witness(spec, secret, LocalRendezvous)
    os.chmod(witness_directory(str(tmp_path), secret), 0o755)  # noqa: PTH101
    with pytest.raises(ConfigError, match="may be used by others"):
        make_witness(f"dir:{tmp_path}", secret, LocalRendezvous)


def test_a_directory_that_cannot_be_a_witness_says_what_to_do(tmp_path: Path) -> None:
    check_witness_directory(str(tmp_path))
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(ConfigError, match=f"--witness-dir {tmp_path / name}: there is no such directory"):
            check_witness_directory(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--witness-dir /proc: it cannot be written to \(.*\); all processes"):
        check_witness_directory("/proc")
