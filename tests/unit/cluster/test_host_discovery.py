"""Which ranks share a host, and what Horovod's numbers are then."""

import os
import subprocess
import sys

import msgspec
import pytest

from reigen.cluster.host_discovery import HostLayout, discover_hosts, host_identity, make_host_layout
from reigen.cluster.local_peers import process_namespace_id
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.rendezvous import LocalRendezvous, RendezvousClient
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError, DeadlineError, PeerLostError
from reigen.testing import run_threads
from tests.patience import patiently


def layout(rank, host_ids):
    return make_host_layout(rank, tuple(host_ids), tuple(f"host-{host_id}" for host_id in host_ids))


def numbers(host_ids):
    """(local rank, local size, cross rank, cross size) of every rank."""
    places = [layout(rank, host_ids).topology() for rank in range(len(host_ids))]
    assert [(place.rank, place.size) for place in places] == [(rank, len(host_ids)) for rank in range(len(host_ids))]
    return [(place.local_rank, place.local_size, place.cross_rank, place.cross_size) for place in places]


def test_one_host():
    assert layout(1, "aaa").hosts == ((0, 1, 2),)
    assert layout(1, "aaa").topology() == Topology.on_one_host(1, 3)


def test_hosts_are_ordered_by_their_lowest_rank_whatever_they_are_called():
    two = layout(2, "zzaa")
    assert two.hosts == ((0, 1), (2, 3))
    assert two.local == (2, 3)
    assert two.hostnames == ("host-z", "host-z", "host-a", "host-a")
    assert numbers("zzaa") == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]


def test_ranks_in_turn():
    assert layout(0, "abab").hosts == ((0, 2), (1, 3))
    assert numbers("abab") == [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]


def test_uneven_hosts_count_only_those_that_have_the_local_rank():
    uneven = layout(4, "abbbcc")
    assert uneven.hosts == ((0,), (1, 2, 3), (4, 5))
    assert numbers("abbbcc") == [(0, 1, 0, 3), (0, 3, 1, 3), (1, 3, 0, 2), (2, 3, 0, 1), (0, 2, 2, 3), (1, 2, 1, 2)]


def test_what_tells_hosts_apart():
    assert host_identity()[0] == process_namespace_id()
    assert host_identity("left")[0] != host_identity("right")[0] != host_identity()[0]
    assert host_identity("left")[1] == f"{host_identity()[1]}/left"


@pytest.mark.parametrize("over_a_service", [False, True])
def test_all_ranks_find_the_same(over_a_service):
    hosts = ["h1", "h2", "h1", "", "h2"]
    secret = b"s" * 32
    server = ControlService(secret)
    server.start()

    def find(rank, shared):
        rendezvous = RendezvousClient(server.address, secret, rank, 10.0) if over_a_service else shared
        try:
            return discover_hosts(rendezvous, rank, len(hosts), 10.0, hosts[rank])
        finally:
            rendezvous.close()

    found = run_threads(find, len(hosts))
    server.close()
    name = host_identity()[1]
    assert found == [
        HostLayout(rank, ((0, 2), (1, 4), (3,)), (f"{name}/h1", f"{name}/h2", f"{name}/h1", name, f"{name}/h2"))
        for rank in range(len(hosts))
    ]


def test_who_does_not_come_is_named_on_all_that_did():
    def attempt(seconds):
        def find(rank, shared):
            if rank in {2, 4}:
                return None
            with pytest.raises(
                DeadlineError, match=rf"rank\(s\) 2, 4 did not call init\(\) within {seconds:g} s"
            ) as caught:
                discover_hosts(shared, rank, 5, seconds)
            return caught.value.ranks

        assert run_threads(find, 5) == [(2, 4), (2, 4), None, (2, 4), None]

    patiently(attempt, 0.2)


def test_rank_0_does_not_come():
    def attempt(seconds):
        def find(rank, shared):
            if rank in {0, 3}:
                return None
            with pytest.raises(DeadlineError) as caught:
                discover_hosts(shared, rank, 4, seconds)
            return caught.value.ranks

        assert run_threads(find, 4) == [None, (0, 3), (0, 3), None]

    patiently(attempt, 0.1)


def test_a_rank_that_comes_late_meets_those_that_try_again():
    """What rank 0 said of the first try is no news any more."""

    def attempt(seconds):

        def find(rank, shared):
            if rank == 0:
                with pytest.raises(DeadlineError, match=r"rank\(s\) 1 did not call"):
                    discover_hosts(shared, 0, 2, seconds)
                shared.put("late", b"")
            else:
                shared.get("late", 10.0)
            return discover_hosts(shared, rank, 2, 10.0).hosts

        assert run_threads(find, 2) == [((0, 1),)] * 2

    patiently(attempt, 0.1)


def test_the_death_of_rank_0_is_noticed():
    host_id, name = host_identity()
    ended = subprocess.Popen([sys.executable, "-Sc", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    shared = LocalRendezvous()
    shared.put("place/0", msgspec.msgpack.encode([host_id, name, ended.pid, 3, []]))
    with pytest.raises(PeerLostError, match="died during init") as caught:
        discover_hosts(shared, 1, 3, 20.0)
    assert caught.value.ranks == (0,)
    ended.wait()
    with pytest.raises(PeerLostError, match="died during init"):
        discover_hosts(shared, 1, 3, 20.0)
    shared.put("place/0", msgspec.msgpack.encode(["elsewhere", name, ended.pid, 3, []]))
    with pytest.raises(DeadlineError) as late:
        discover_hosts(shared, 1, 3, 0.3)
    assert late.value.ranks == (2,)


@pytest.mark.parametrize(
    ("sizes", "words", "told"),
    [
        ((3, 3, 3), ("ring", "direct", "ring"), "^NAME must be the same .*, and is ring for .* 0, 2; direct for .* 1"),
        ((3, 2), ("ring", "ring"), "^the number of ranks must be the same .*, and is 3 for .* 0; 2 for .* 1"),
        ((2, 3), ("ring", "ring"), "^the number of ranks must be the same .*, and is 2 for .* 0; 3 for .* 1"),
    ],
)
def test_ranks_that_were_told_different_things_hear_of_it_on_all_sides(sizes, words, told):
    def find(rank, shared):
        with pytest.raises(ConfigError, match=told):
            discover_hosts(shared, rank, sizes[rank], 10.0, terms=[f"NAME={words[rank]}"])

    run_threads(find, len(sizes))
