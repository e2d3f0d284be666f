"""The doctor for several hosts: what it makes of what it finds."""

import itertools

import pytest

from reigen.cli.check_hosts import check_clocks, check_pythons, format_rate, hosts_by_rank
from reigen.cli.host_pairs import rounds
from reigen.cli.main import main
from reigen.cli.tables import format_columns
from reigen.launch.agent.host_probe import ClockOffset, HostProbe, estimate_clock_offset


def test_each_two_meet_once_and_nobody_is_in_two_places():
    for size in range(1, 12):
        played = rounds(size)
        for round_ in played:
            players = [player for pair in round_ for player in pair]
            assert len(players) == len(set(players))
        assert sorted(pair for round_ in played for pair in round_) == list(itertools.combinations(range(size), 2))
        assert len(played) <= size


def test_a_clock_is_as_sure_as_the_quickest_answer():
    assert estimate_clock_offset([]) is None
    assert estimate_clock_offset([(0.0, 3.0, 2.0), (10.0, 12.25, 10.5)]) == ClockOffset(2.0, 0.25)


def test_clocks_that_are_apart_are_worth_a_remark():
    visits = [
        HostProbe("a"),
        HostProbe("b", clock=ClockOffset(1.05, 0.1)),
        HostProbe("c", clock=ClockOffset(-7.0, 0.1)),
    ]
    assert check_clocks(visits) == ["the clock of c is 7.0 s behind this host's: is it synchronised (NTP)?"]


def test_different_pythons_are_a_problem():
    same = [HostProbe("a", python="3.11.2"), HostProbe("b", python="3.11.9"), HostProbe("c")]
    assert check_pythons(same) == []
    assert check_pythons([*same, HostProbe("d", python="3.12.0")]) == ["different Pythons: 3.11 on a, b; 3.12 on d"]


def test_this_host_is_one_host_by_whichever_name():
    assert hosts_by_rank(["a.invalid", "localhost", "127.0.0.1", "b.invalid"]) == [
        "a.invalid",
        "localhost",
        "b.invalid",
    ]


def test_rates_and_tables():
    assert (format_rate(1.2e6), format_rate(125e6)) == ("10 Mbit/s", "1.0 Gbit/s")
    assert format_columns([["a", "b"], ["long", ""]]) == ["a     b", "long"]


@pytest.mark.parametrize(
    "arguments", [["--hosts", "a b"], ["--hosts", "a", "--hostfile", "b"], ["--hostfile", "/nowhere"]]
)
def test_what_makes_no_sense(arguments, capsys):
    with pytest.raises(SystemExit):
        main(["check", *arguments])
    assert capsys.readouterr().err


def test_this_host_alone(capsys):
    assert main(["check", "--hosts", "localhost"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["host", "Reigen", "Python"]
    assert "this one" in lines[1]
    assert lines[-1] == "these hosts can run jobs together"
