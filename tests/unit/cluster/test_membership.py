"""A rank's knowledge of the others' ends: the words, then the real service, processes, forks and machines."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.abort_message import make_abort_message
from reigen.cluster.membership.client import MembershipClient
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.messages import (
    MemberAborted,
    MemberAssigned,
    MemberLeft,
    MemberLost,
    MembershipNews,
    RegisterMember,
)
from reigen.cluster.membership.view import JobView
from reigen.errors import ArgumentError, AuthenticationError, CollectiveError, DeadlineError, PeerLostError
from reigen.net.auth import Identity, ProcessRole
from tests.multiprocess.launcher import until
from tests.patience import patiently

SECRET = b"s" * 32
EVERYBODY = range(8)


def fates(*events, rank=0):
    known = JobView(RegisterMember("rank", rank, "h0", 77, {"rank": 8}), peer_timeout_seconds=20.0)
    known.take(MemberAssigned(rank, False, 1))
    for event in events:
        known.take(MembershipNews((event,)))
    return known


def died(rank, *others, host, whole=False, silent=False):
    return MemberLost("rank", rank, host, "its process ended", False, 0, others, whole, silent)


def left(rank, host):
    return MemberLeft("rank", rank, host)


def abort_of(rank, error):
    return MemberAborted("rank", rank, f"h{rank}", make_abort_message(error, rank))


# -- what follows from what is known ----------------------------------------------------------------------------------


def test_nothing_has_happened():
    assert fates().rank_error(EVERYBODY) is None


def test_a_death_names_rank_and_host():
    error = fates(died(3, host="h2")).rank_error([1, 3])
    assert type(error) is PeerLostError
    assert error.reason == "rank(s) 3 (host h2) died while others wait for them"
    assert error.ranks == (3,)
    assert fates(died(3, host="h2")).rank_error([1, 2]) is None


def test_only_those_of_the_dead_that_are_waited_for_are_named():
    error = fates(died(3, 4, host="h2")).rank_error([1, 3])
    assert (error.ranks, error.reason) == ((3,), "rank(s) 3 (host h2) died while others wait for them")


def test_a_host_all_ranks_of_which_died_at_once():
    error = fates(died(2, 3, host="h2", whole=True)).rank_error([1, 3])
    assert "host h2 was lost, or all its processes were killed: its rank(s) 2, 3 died at once" in error.reason
    assert error.ranks == (2, 3)


def test_a_silent_host():
    error = fates(died(2, 3, host="h2", whole=True, silent=True)).rank_error([1, 2, 3])
    assert "host h2 was lost, and rank(s) 2, 3 with it: nothing was heard of it for 20 s" in error.reason
    assert error.ranks == (2, 3)


def test_a_host_that_was_cut_off_is_told_so_when_it_comes_back():
    error = fates(died(0, 1, host="h1", whole=True, silent=True)).rank_error([2])
    assert "this rank, 0, was given up by the others: nothing was heard of its host, h1, for 20 s" in error.reason
    assert type(error) is PeerLostError


def test_the_dead_are_the_cause_and_those_who_aborted_or_left_the_victims():
    death = died(2, host="h2")
    aborted = abort_of(1, PeerLostError("rank 2 has gone", ranks=[2]))
    for events in ((left(3, "h3"), aborted, death), (death, aborted, left(3, "h3"))):
        error = fates(*events).rank_error(EVERYBODY)
        assert error.reason == "rank(s) 2 (host h2) died while others wait for them"
    error = fates(left(3, "h3"), aborted).rank_error(EVERYBODY)
    assert (error.reason, error.ranks) == ("rank 2 has gone (told by rank 1, host h1)", (2,))


def test_the_first_death_is_the_cause_of_the_next():
    error = fates(died(5, host="h3"), died(2, host="h2")).rank_error(EVERYBODY)
    assert error.ranks == (5,)


def test_ranks_that_left():
    known = fates(left(4, "h2"), left(1, "h1"), left(5, "h2"), rank=2)
    error = known.rank_error(EVERYBODY)
    assert error.reason == (
        "rank(s) 1 (host h1), 4, 5 (host h2) left the job (shutdown, or the end of the script) while others wait for "
        "them"
    )
    assert error.ranks == (1, 4, 5)
    assert known.rank_error([0, 3]) is None


@pytest.mark.parametrize("kind", [CollectiveError, DeadlineError, PeerLostError])
def test_an_abort_arrives_as_what_it_was(kind):
    error = fates(abort_of(1, kind("too late", ranks=[3]))).rank_error([5])
    assert type(error) is kind
    assert (error.reason, error.ranks) == ("too late (told by rank 1, host h1)", (3,))


def test_an_own_abort_ends_the_own_waiting():
    known = fates()
    own = DeadlineError("too late", ranks=[3])
    known.abort(own)
    known.take(MembershipNews((abort_of(0, own),)))
    assert known.rank_error([1]) is own


# -- with the service -------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    service = ControlService(SECRET)
    service.start()
    yield service
    service.close()


def member(server, rank, size=2, group="0", host_id=""):
    return MembershipClient(
        server.address, SECRET, group, rank, size, timeout_seconds=60.0, peer_timeout_seconds=60.0, host_id=host_id
    )


def failure_of(one, needed=EVERYBODY):
    """The first failure that is seen."""
    seen = []

    def look():
        one.wait_for_death(0.05)
        seen.append(one.failure(needed))
        return seen[-1]

    until(look, 60.0)
    return seen[-1]


def test_leaving(server):
    zero, one = member(server, 0), member(server, 1)
    assert (zero.failure(EVERYBODY), one.failure(EVERYBODY)) == (None, None)
    one.leave()
    one.abort(CollectiveError("said too late"))
    one.close()
    error = failure_of(zero)
    assert error.ranks == (1,)
    assert f"rank(s) 1 (host {host_identity()[1]}) left the job" in error.reason
    assert zero.failure([0]) is None
    zero.close()
    zero.close()
    assert zero.failure([0]) is None


def test_giving_up(server):
    members = [member(server, rank, 3) for rank in range(3)]
    own = DeadlineError("rank 2 is late", ranks=[2])
    members[1].abort(own)
    members[1].leave()
    for rank in (0, 2):
        error = failure_of(members[rank], [rank])
        assert type(error) is DeadlineError
        assert error.reason == f"rank 2 is late (told by rank 1, host {host_identity()[1]})"
        assert error.ranks == (2,)
    assert members[1].failure([]) is own
    for each in members:
        each.close()


def test_who_enters_late_knows_at_once(server):
    zero, one = member(server, 0, 3), member(server, 1, 3, host_id="other")
    one.close()
    assert failure_of(zero).ranks == (1,)
    late = member(server, 2, 3)
    assert "rank(s) 1 (host" in failure_of(late).reason
    late.close()
    zero.close()


def test_refusals(server):
    zero = member(server, 0)
    with pytest.raises(ArgumentError, match=r"refuses rank 0: rank 0 is there already, on host"):
        member(server, 0)
    with pytest.raises(ArgumentError, match=r"expects 3 rank\(s\), but this job has 2"):
        member(server, 1, 3)
    assert zero.failure(EVERYBODY) is None
    zero.close()
    member(server, 0, group="next").close()


def test_the_wrong_secret_and_nobody_there(server):
    with pytest.raises(AuthenticationError):
        MembershipClient(server.address, b"x" * 32, "", 0, 1, timeout_seconds=60.0, peer_timeout_seconds=60.0)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # accepts in the kernel, never answers
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=rf"{address} did not answer within 0.2 s"):
            MembershipClient(address, SECRET, "", 0, 1, timeout_seconds=0.2, peer_timeout_seconds=60.0)
    with pytest.raises(PeerLostError, match=rf"control service at {address} has gone"):
        MembershipClient(address, SECRET, "", 0, 1, timeout_seconds=60.0, peer_timeout_seconds=60.0)


@pytest.mark.parametrize(
    ("me", "reason", "ranks"),
    [
        (
            Identity(ProcessRole.LAUNCHER, 0),
            "the launcher's control service at {} has gone .*: `reigen run` has ended",
            (),
        ),
        (Identity(ProcessRole.RANK, 0), "rank 0 has ended, and with it the job's control service at {}", (0,)),
    ],
)
def test_the_service_goes(me, reason, ranks):
    service = ControlService(SECRET, me=me)
    service.start()
    one = member(service, 1)
    service.close()
    error = failure_of(one, [])
    assert error.ranks == ranks
    assert re.search(reason.format(re.escape(service.address)), error.reason)
    one.linger([0])
    one.close()


def test_a_service_that_is_closed_says_what_it_held():
    service = ControlService(SECRET, me=Identity(ProcessRole.RANK, 0))
    service.start()
    zero, one = member(service, 0), member(service, 1)
    zero.abort(CollectiveError("no reason"))
    zero.close()
    service.close()
    assert failure_of(one).reason == f"no reason (told by rank 0, host {host_identity()[1]})"
    one.close()


def test_lingering_waits_for_who_left_but_not_for_the_dead(server, monkeypatch):
    def attempt(seconds):
        monkeypatch.setattr("reigen.cluster.membership.client.LINGER_SECONDS", seconds)
        group = f"{seconds:g}"
        with contextlib.ExitStack() as stack:
            zero, one, two = (member(server, rank, 3, group, host_id=str(rank)) for rank in range(3))
            stack.callback(zero.close)
            one.close()
            failure_of(zero)
            begun = time.monotonic()
            zero.linger([0, 1])
            short = time.monotonic() - begun
            two.leave()
            two.close()
            zero.linger([2])
            assert time.monotonic() - begun - short > 0.8 * seconds > short

    patiently(attempt)


def test_threads_may_share_one(server):
    zero, one = member(server, 0), member(server, 1)
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            if error := zero.failure(EVERYBODY):
                seen.append(error.ranks)
                return

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    one.close()
    for thread in threads:
        thread.join(10.0)
    stop.set()
    assert seen == [(1,)] * 4
    zero.close()


# -- processes --------------------------------------------------------------------------------------------------------


JOIN = """
import os, sys, time
from reigen.cluster.membership.client import MembershipClient
address, rank, size, host_id = sys.argv[1:5]
one = MembershipClient(address, b"s" * 32, "0", int(rank), int(size), timeout_seconds=60.0, peer_timeout_seconds=60.0,
                 host_id=host_id)
"""


def process(server, rank, size, host_id, then):
    """A process that becomes a member, says so, and goes on."""
    started = subprocess.Popen(
        [
            sys.executable,
            "-c",
            JOIN + "print('here', flush=True)\n" + then,
            server.address,
            str(rank),
            str(size),
            host_id,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout.readline() == "here\n"
    return started


def end(*processes):
    for each in processes:
        each.kill()
        each.communicate()


def test_a_killed_process_has_died(server):
    zero = member(server, 0)
    victim = process(server, 1, 2, "h2", "input()")
    victim.kill()
    error = failure_of(zero)
    assert (error.ranks, "died while others wait" in error.reason) == ((1,), True)
    assert "/h2)" in error.reason
    end(victim)
    zero.close()


def test_all_processes_of_a_host_are_killed(server):
    zero = member(server, 0, 3)
    victims = [process(server, rank, 3, "h2", "input()") for rank in (1, 2)]
    for victim in victims:
        victim.kill()
    error = failure_of(zero)
    assert error.ranks == (1, 2)
    assert "/h2 was lost, or all its processes were killed" in error.reason
    end(*victims)
    zero.close()


def test_a_stopped_process_is_not_dead(server):
    zero = member(server, 0)
    stopped = process(server, 1, 2, "h2", "input()")
    stopped.send_signal(signal.SIGSTOP)
    zero.wait_for_death(0.3)
    assert zero.failure(EVERYBODY) is None
    end(stopped)
    assert failure_of(zero).ranks == (1,)
    zero.close()


def test_forked_children_do_not_keep_a_dead_rank_alive(server):
    zero = member(server, 0)
    fork = """
child = os.fork()
if child == 0:
    sys.stdin.readline()  # lives until the test ends it
    os._exit(0)
print(child, flush=True)
input()
"""
    victim = process(server, 1, 2, "h2", fork)
    child = int(victim.stdout.readline())
    os.kill(victim.pid, signal.SIGKILL)
    assert failure_of(zero).ranks == (1,)
    assert os.path.exists(f"/proc/{child}/exe")  # noqa: PTH110  the child has outlived it
    end(victim)
    bury(child)
    zero.close()


def bury(orphan):
    """Wait for a process that may have been given to this one: an earlier test can have made it a subreaper."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(orphan, 0)


def test_forked_children_do_not_keep_the_service_of_a_dead_rank_alive():
    host = """
import os, sys
from reigen.cluster.membership.control_service import ControlService
from reigen.net.auth import Identity, ProcessRole
service = ControlService(b"s" * 32, me=Identity(ProcessRole.RANK, 0))
service.start()
print(service.address, flush=True)
input()
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
input()
"""
    hosting = subprocess.Popen(
        [sys.executable, "-c", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    address = hosting.stdout.readline().strip()
    one = MembershipClient(address, SECRET, "0", 1, 2, timeout_seconds=60.0, peer_timeout_seconds=60.0)
    hosting.stdin.write("\n")
    hosting.stdin.flush()
    child = int(hosting.stdout.readline())
    os.kill(hosting.pid, signal.SIGKILL)
    error = failure_of(one)
    assert "rank 0 has ended, and with it the job's control service" in error.reason
    end(hosting)
    bury(child)
    one.close()
