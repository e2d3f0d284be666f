"""Processes of an elastic job that have too few descriptors, or too little memory, say so, and the others go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cgroups import limited
from tests.elastic.elastic_processes import ElasticProcesses, Member
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import Ledger, count_steps
from tests.multiprocess.launcher import until

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Starts processes of `job_program`."""
    server = ForkServer("tests.elastic.job_program")
    yield server
    server.close()


def start(server: ForkServer, **environ: str) -> ElasticProcesses:
    return ElasticProcesses("1000", "60", "0.01", max_size=3, server=server, **environ)


def check_others(members: list[Member], *more: Member) -> None:
    """Whoever is left makes steps, of which none is lost, with equal weights."""
    before = [count_steps(member) for member in members]
    until(lambda: all(count_steps(each) >= number + 3 for each, number in zip(members, before, strict=True)))
    ledger = Ledger()
    ledger.read([*members, *more])
    assert {at: found for at, found in ledger.digests.items() if len(found) > 1} == {}
    for member in members:
        numbers = [int(line.split()[1]) for line in list(member.lines) if line.startswith("STEP ")]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("left", [0, 6])
def test_a_newcomer_without_descriptors_names_the_limit(server: ForkServer, left: int) -> None:
    """It cannot connect to the members, or, with a few, not build the view that takes it in."""
    with start(server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, DESCRIPTORS_LEFT=str(left))
        # who is in no view is killed, if it takes a while to end
        assert newcomer.wait() in {1, -signal.SIGKILL}
        said = "\n".join(newcomer.lines)
        assert "Too many open files: a process may have" in said, said
        assert "ulimit -n" in said
        check_others(members)


def test_a_newcomer_without_shared_memory_ends_with_that_error_and_the_others_go_on(server: ForkServer) -> None:
    """The allocation fails on all ranks in the first step: those that had enough go on without the one that had not."""
    with start(server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, SHARED_MEMORY_FULL="1")
        assert newcomer.wait() in {1, -signal.SIGKILL}
        said = "\n".join(newcomer.lines)
        assert "SharedMemoryError" in said, said
        assert "not enough shared memory for registered memory" in said
        check_others(members)


def test_a_newcomer_in_a_control_group_without_memory_names_it(server: ForkServer) -> None:
    with limited(8 * MIB) as group, start(server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2, CGROUP=str(group.directory))
        assert newcomer.wait() in {1, -signal.SIGKILL}
        said = "\n".join(newcomer.lines)
        assert "not enough shared memory for staging and control messages" in said, said
        assert str(group.limit) in said
        check_others(members)


def test_where_a_host_has_too_little_memory_for_one_more_the_newcomer_ends(server: ForkServer) -> None:
    """All have too little in a view of three; the members had enough before."""
    with start(server, ROOM_FOR="2") as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        newcomer = job.start_candidate(2)
        assert newcomer.wait() in {1, -signal.SIGKILL}
        said = "\n".join(newcomer.lines)
        assert "not enough shared memory for staging and control messages" in said, said
        check_others(members)


def test_a_rank_that_the_kernel_kills_for_its_memory_is_left_out(server: ForkServer) -> None:
    with limited(160 * MIB) as group, start(server) as job:
        members = [*job.start_first(2)]
        job.wait_for("STEP 3 ")
        victim = job.start_candidate(2, CGROUP=str(group.directory), TAKES_BYTES=str(400 * MIB))
        assert victim.wait() == -signal.SIGKILL
        assert 1 <= count_steps(victim) <= 3  # one may have been undone
        check_others(members, victim)
