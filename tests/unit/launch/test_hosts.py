"""Which hosts a list names, and which ranks they get."""

import itertools
import socket

import pytest

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.hosts import (
    HostAssignment,
    HostInfo,
    assign_ranks,
    assign_ranks_and_servers,
    is_own_address,
    is_this_host,
    parse_hostfile,
    parse_hosts,
    parse_mxnet_hostfile,
)
from reigen.launch.ps_processes import ServerOptions


def test_lists():
    assert parse_hosts("localhost:4") == [HostInfo("localhost", 4)]
    assert parse_hosts("a:2, b.example.org ,10.0.0.1:1") == [
        HostInfo("a", 2),
        HostInfo("b.example.org", 1),
        HostInfo("10.0.0.1", 1),
    ]
    assert parse_hosts("::1") == parse_hosts("[::1]") == [HostInfo("::1", 1)]
    assert parse_hosts("[fd77::1]:2,[fe80::1%eth0]") == [HostInfo("fd77::1", 2), HostInfo("fe80::1%eth0", 1)]


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:-1", "a:x", "a:2:3", "a b", ":2", "a=2", "fd77::1:2", "[a", "[]"])
def test_lists_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="not of the form"):
        parse_hosts(text)


def test_files():
    text = "# two hosts\nlocalhost slots=2\n\n  b slots = 3 # the other\nc:4\nd\n"
    assert parse_hostfile(text) == [HostInfo("localhost", 2), HostInfo("b", 3), HostInfo("c", 4), HostInfo("d", 1)]


def test_addresses_in_files():
    assert parse_hostfile("[fd77::1] slots=2\n[fd77::2]:3\n") == [HostInfo("fd77::1", 2), HostInfo("fd77::2", 3)]


def test_a_plain_list_of_hosts_shares_the_ranks_out():
    assert parse_hostfile("a\nb\nc\n", 8) == [HostInfo("a", 3), HostInfo("b", 3), HostInfo("c", 2)]
    assert parse_hostfile("a\nb\n", 1) == [HostInfo("a", 1), HostInfo("b", 1)]
    assert parse_hostfile("a\nb slots=1\n", 8) == [HostInfo("a", 1), HostInfo("b", 1)]


@pytest.mark.parametrize("line", ["a:22", "a:2222"])
def test_a_port_is_no_number_of_ranks(line):
    with pytest.raises(ConfigError, match="behind the colon is a number of ranks, no port; say a slots=n"):
        parse_hostfile(line)


@pytest.mark.parametrize(("text", "message"), [("", "names no host"), ("a\nb slots=none", "line 2 .* 'b slots=none'")])
def test_files_that_make_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_hostfile(text)


def seats(text, num_ranks, here=("localhost",)):
    return assign_ranks(parse_hosts(text), num_ranks, lambda name: name in here)


def test_ranks_fill_the_hosts_in_their_order():
    assert seats("a:2,b:4,c:9", 5) == [
        HostAssignment("a", False, (Topology(0, 5, 0, 2, 0, 2), Topology(1, 5, 1, 2, 0, 2))),
        HostAssignment(
            "b", False, (Topology(2, 5, 0, 3, 1, 2), Topology(3, 5, 1, 3, 1, 2), Topology(4, 5, 2, 3, 0, 1))
        ),
    ]


def test_the_numbers_agree_for_every_shape():
    for counts in itertools.product(range(1, 4), repeat=3):
        text = ",".join(f"h{index}:{count}" for index, count in enumerate(counts))
        places = [(each.host, topology) for each in seats(text, sum(counts)) for topology in each.topologies]
        assert [topology.rank for _, topology in places] == list(range(sum(counts)))
        for host, topology in places:
            having = [other for other, peer in places if peer.local_rank == topology.local_rank]
            assert (topology.cross_rank, topology.cross_size) == (having.index(host), len(having))
            assert topology.local_size == sum(other == host for other, _ in places)


def test_a_hostfile_of_mxnets_launcher():
    one = [HostInfo("h1", 1), HostInfo("h2", 1)]
    assert parse_mxnet_hostfile("h1\n\nh2 # the other one\n") == (one, None)
    assert parse_mxnet_hostfile("h1 slots=4\nh2 slots=2") == (one, None)
    assert parse_mxnet_hostfile("h1:2222\nh2:2222") == (one, 2222)
    assert parse_mxnet_hostfile("h1:22\nh2") == (one, 22)
    assert parse_mxnet_hostfile("h1:4\nh2:4") == (one, None)
    for text, message in (("h1:22\nh2:2222", "different ports, 22, 2222"), ("", "names no host"), ("h1 h2", "line 1")):
        with pytest.raises(ConfigError, match=message):
            parse_mxnet_hostfile(text)


def homes(text, num_ranks, servers, here=("here",)):
    """Who is where: host, and its ranks and servants by name."""
    seats = assign_ranks_and_servers(parse_hosts(text), num_ranks, servers, lambda name: name in here)
    assert [each.is_local for each in seats] == [each.host in {*here, "localhost"} for each in seats]
    return {each.host: [*each.ranks, *(servant.name for servant in each.ps_processes)] for each in seats}


def test_servers_run_in_turn_on_the_hosts_of_the_ranks_and_the_scheduler_runs_here():
    assert homes("a:2,here:2,b:2", 6, ServerOptions(4)) == {
        "a": [0, 1, "server 0", "server 3"],
        "here": [2, 3, "server 1", "scheduler"],
        "b": [4, 5, "server 2"],
    }


def test_the_scheduler_runs_here_even_where_nothing_else_does():
    assert homes("a:2", 2, ServerOptions(1)) == {"a": [0, 1, "server 0"], "localhost": ["scheduler"]}


def test_servers_may_have_hosts_of_their_own():
    assert homes("here:1,a:1", 2, ServerOptions(3, hosts=("b", "c"))) == {
        "here": [0, "scheduler"],
        "a": [1],
        "b": ["server 0", "server 2"],
        "c": ["server 1"],
    }


def test_workers_are_dealt_to_the_hosts_behind_the_servers_as_mxnet_documents_it():
    """`launch.py -n 3` and five hosts: servers on the first three, workers on the fourth, the fifth and the first."""
    assert homes("h1,h2,h3,h4,h5", 3, ServerOptions(3, round_robin_workers=True), ("h1",)) == {
        "h4": [0],
        "h5": [1],
        "h1": [2, "server 0", "scheduler"],
        "h2": ["server 1"],
        "h3": ["server 2"],
    }


def test_the_places_of_dealt_workers_agree():
    seats = assign_ranks_and_servers(parse_hosts("a,b"), 5, ServerOptions(1, round_robin_workers=True), lambda _: False)
    places = {topology.rank: (each.host, topology) for each in seats for topology in each.topologies}
    assert [places[rank][0] for rank in range(5)] == ["b", "a", "b", "a", "b"]
    assert places[2][1] == Topology(2, 5, 1, 3, 0, 2)
    assert places[4][1] == Topology(4, 5, 2, 3, 0, 1)
    assert places[3][1] == Topology(3, 5, 1, 2, 1, 2)


def test_this_host_by_any_of_its_names_is_one_host():
    assert [
        (each.host, each.is_local, each.ranks) for each in seats("here:1,b:1,localhost:1", 3, ("here", "localhost"))
    ] == [
        ("here", True, (0, 1)),
        ("b", False, (2,)),
    ]


def test_a_host_that_is_named_twice_has_the_slots_of_both_places():
    assert [(each.host, each.ranks) for each in seats("a:1,b:1,a:2", 4)] == [("a", (0, 1, 2)), ("b", (3,))]


def test_too_few_slots():
    with pytest.raises(ConfigError, match="have 3 slots, and 4 processes"):
        seats("localhost:2,b", 4)


def test_which_names_are_this_host():
    assert is_this_host("localhost")
    assert is_this_host("127.0.0.1")
    assert is_this_host("::1")
    assert is_this_host(socket.gethostname())
    assert not is_this_host("no-such-host.invalid")
    assert not is_own_address("192.0.2.1")  # TEST-NET-1: nobody's
