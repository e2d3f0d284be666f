"""Pipes between the launcher and the scheduler of parameter servers."""

from __future__ import annotations

import os

from reigen.cluster.inherited_files import find_inherited
from reigen.launch.elastic.supervision import parse_worker_report
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.ps_processes import PsProcess, PsRole
from reigen.launch.supervision.scheduler_pipes import LOOK_SECONDS, SchedulerPipes

SCHEDULER = ProcessSpec(None, (), {"A": "b"}, PsProcess(7, PsRole.SCHEDULER, 0))


def test_the_scheduler_reports_and_hears_of_deaths() -> None:
    pipes = SchedulerPipes()
    spec = pipes.attach(SCHEDULER, is_elastic=True)
    variables = "REIGEN_LEFT_FD", "REIGEN_ENDED_FD", "REIGEN_ROSTER_FD"
    found = [find_inherited(spec.environ, name, "a file of the launcher") for name in variables]
    assert found == list(spec.descriptors)
    reports, deaths, _ = spec.descriptors
    assert list(pipes.read()) == []
    os.write(reports, b"joined 3 1\n")
    assert list(pipes.read()) == [b"joined 3 1\n"]
    pipes.announce_deaths([(3, 1), (4, 0)])
    assert os.read(deaths, 100) == b"3 1\n4 0\n"
    pipes.close()


def test_keys_are_noted_and_are_no_report_of_workers() -> None:
    pipes = SchedulerPipes()
    reports, *_ = pipes.attach(SCHEDULER, is_elastic=True).descriptors
    os.write(reports, b"open\nholds 0 1 key: 'a b'\njoined 0 0\nholds 1 2 keys: 'c', 'd'\n")
    assert list(pipes.read()) == [b"open\njoined 0 0\n"]
    assert pipes.held == {0: "1 key: 'a b'", 1: "2 keys: 'c', 'd'"}
    pipes.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_silence_of_the_scheduler_is_counted_from_its_latest_word() -> None:
    clock = Clock()
    pipes = SchedulerPipes(clock)
    reports, *_ = pipes.attach(SCHEDULER, is_elastic=True).descriptors
    clock.now += 5.0
    assert list(pipes.read()) == []
    assert pipes.look() is None, "it was not heard yet"
    os.write(reports, b"alive\n")
    clock.now += 0.75
    assert [*map(parse_worker_report, pipes.read())] == [[]]
    assert pipes.look() == 0.0
    for seconds in (0.5, 1.0, 1.5):
        clock.now += 0.5
        assert pipes.look() == seconds
    os.write(reports, b"open\n")
    assert list(pipes.read()) == [b"open\n"]
    assert pipes.silent_seconds == 0.0
    pipes.close()


def test_time_in_which_the_launcher_was_stopped_is_no_silence_of_the_scheduler() -> None:
    clock = Clock()
    pipes = SchedulerPipes(clock)
    reports, *_ = pipes.attach(SCHEDULER, is_elastic=True).descriptors
    os.write(reports, b"alive\n")
    list(pipes.read())
    clock.now += 3600.0
    assert pipes.look() == LOOK_SECONDS
    pipes.close()


def test_a_server_whose_keys_are_not_told_is_no_error() -> None:
    pipes = SchedulerPipes()
    reports, *_ = pipes.attach(SCHEDULER, is_elastic=True).descriptors
    os.write(reports, b"holds 0 \njoined 0 0\n")
    assert list(pipes.read()) == [b"joined 0 0\n"]
    assert pipes.held == {0: ""}
    pipes.close()


def test_a_scheduler_that_does_not_read_holds_nothing_up() -> None:
    pipes = SchedulerPipes()
    for _ in range(100_000):
        pipes.announce_deaths([(1, 1)])
    pipes.close()


def test_only_an_elastic_jobs_scheduler_hears_of_deaths_and_only_schedulers_report() -> None:
    pipes = SchedulerPipes()
    assert len(pipes.attach(SCHEDULER, is_elastic=False).descriptors) == 1
    server = ProcessSpec(None, (), {}, PsProcess(6, PsRole.SERVER, 0))
    assert pipes.attach(server, is_elastic=True) is server
    pipes.close()
