"""Which hosts a list names, and whether they are this one."""

import pytest

from reigen.errors import ConfigError
from reigen.launch.hosts import Host, check_all_here, check_fixed_size, parse_hostfile, parse_hosts


def test_lists():
    assert parse_hosts("localhost:4") == [Host("localhost", 4)]
    assert parse_hosts("a:2, b.example.org ,10.0.0.1:1") == [
        Host("a", 2),
        Host("b.example.org", 1),
        Host("10.0.0.1", 1),
    ]
    assert parse_hosts("::1") == parse_hosts("[::1]") == [Host("::1", 1)]


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:-1", "a:x", "a:2:3", "a b", ":2", "a=2"])
def test_lists_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="not of the form"):
        parse_hosts(text)


def test_files():
    text = "# two hosts\nlocalhost slots=2\n\n  b slots = 3 # the other\nc:4\nd\n"
    assert parse_hostfile(text) == [Host("localhost", 2), Host("b", 3), Host("c", 4), Host("d", 1)]


@pytest.mark.parametrize(("text", "message"), [("", "names no host"), ("a\nb slots=none", "line 2 .* 'b slots=none'")])
def test_files_that_make_no_sense(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_hostfile(text)


def test_this_host_by_any_of_its_names():
    check_all_here(parse_hosts("localhost:1,127.0.0.1:1,here:2"), 4, {"here"})


def test_other_hosts_and_too_few_slots():
    with pytest.raises(ConfigError, match="there, elsewhere: a job runs on the host that starts it, so far"):
        check_all_here(parse_hosts("there:2,localhost:9,elsewhere:2,there:1"), 2, {"here"})
    with pytest.raises(ConfigError, match="have 3 slots, and 4 processes"):
        check_all_here(parse_hosts("localhost:3"), 4, ())


def test_bounds_that_leave_no_choice_are_no_elastic_job():
    check_fixed_size(2, {"--min-np": None, "--max-np": 2}, None)
    for bounds, discovery, complaint in (
        ({"--min-np": 1, "--max-np": None}, None, "--min-np=1: elastic jobs"),
        ({"--min-np": 1, "--max-np": 4}, None, "--min-np=1, --max-np=4: elastic jobs"),
        ({"--min-np": 2}, "--host-discovery-script", "--host-discovery-script: elastic jobs"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_fixed_size(2, bounds, discovery)
