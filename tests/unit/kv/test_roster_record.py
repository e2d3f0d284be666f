"""Record of an elastic job's roster: what the next scheduler reads, and what an earlier one may not do any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from reigen.cluster.membership.messages import JobEnded, MemberLeft, MemberLost, MemberReturned, WorkerRoster
from reigen.cluster.membership.recorded_job import RecordedEvent, RecordedJob
from reigen.kv.membership import roster_record
from reigen.kv.membership.roster_record import RosterRecord


def came(number: int, incarnation: int, epoch: int, slot: tuple[int, int]) -> RecordedEvent:
    return RecordedEvent(MemberReturned("worker", number, "h", incarnation, is_new=True), epoch, slot)


def lost(number: int, incarnation: int) -> MemberLost:
    return MemberLost("worker", number, "h", "its process ended", incarnation=incarnation)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("reigen-roster")
    yield descriptor
    os.close(descriptor)


def open_record(file: int) -> RosterRecord:
    return RosterRecord(os.dup(file))


def test_the_next_scheduler_reads_all_that_was_recorded(file: int) -> None:
    first = open_record(file)
    events = [came(0, 11, 1, (3, 0)), RecordedEvent(lost(0, 11), 2)]
    assert first.append(events[:1])
    assert first.append(events[1:])
    first.close()
    second = open_record(file)
    assert (second.generation, second.entries) == (2, events)
    second.append([came(1, 12, 3, (3, 1))])
    second.close()
    third = open_record(file)
    assert (third.generation, third.entries) == (3, [*events, came(1, 12, 3, (3, 1))])
    third.close()


def test_a_line_that_was_cut_off_does_not_count(file: int) -> None:
    first = open_record(file)
    first.append([came(0, 11, 1, (3, 0)), came(1, 12, 2, (4, 0))])
    first.close()
    os.ftruncate(file, os.fstat(file).st_size - 5)
    second = open_record(file)
    assert second.entries == [came(0, 11, 1, (3, 0))]
    assert second.append([came(1, 13, 2, (4, 1))])
    second.close()
    third = open_record(file)
    assert third.entries == [came(0, 11, 1, (3, 0)), came(1, 13, 2, (4, 1))]
    third.close()


def test_a_scheduler_that_wakes_behind_another_one_may_tell_nothing(file: int) -> None:
    old = open_record(file)
    assert old.append([came(0, 11, 1, (3, 0))])
    assert old.is_latest()
    new = open_record(file)
    assert not old.is_latest()
    assert not old.append([])
    assert not old.append([RecordedEvent(lost(0, 11), 2)])
    assert new.append([came(1, 12, 2, (4, 0))])
    newest = open_record(file)
    assert newest.entries == [came(0, 11, 1, (3, 0)), came(1, 12, 2, (4, 0))]
    assert not new.is_latest()
    for record in (old, new, newest):
        record.close()


def test_a_stopped_scheduler_is_killed_by_the_next_one(file: int) -> None:
    code = (
        "import os, signal, sys; from reigen.kv.membership.roster_record import RosterRecord; "
        "RosterRecord(int(sys.argv[1])); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], pass_fds=[file])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    record = open_record(file)
    assert process.wait() == -signal.SIGKILL
    assert record.generation == 2
    record.close()


@pytest.mark.parametrize("unknown", ["_start_time", "_process_namespace"])
def test_nobody_is_killed_where_it_is_not_known_whether_it_is_a_scheduler(
    file: int, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no /proc."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        monkeypatch.setattr(roster_record, unknown, lambda *_: "" if unknown == "_process_namespace" else 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: other.pid)
            open_record(file).close()
        second = open_record(file)
        assert second.generation == 2
        second.close()
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait() == 0


def test_a_job_is_what_its_events_have_made_of_it() -> None:
    left = MemberLeft("worker", 1, "h", 12)
    job = RecordedJob.replay(
        [
            came(0, 11, 1, (3, 0)),
            came(1, 12, 2, (4, 0)),
            RecordedEvent(WorkerRoster((0, 1), is_open=True, incarnations=(11, 12)), 3),
            RecordedEvent(lost(0, 11), 4),
            came(0, 13, 5, (3, 1)),
            RecordedEvent(MemberLost("server", 0, "h", "its process ended", will_return=True), 6),
            RecordedEvent(left, 7),
        ]
    )
    assert (job.epoch, job.num_joined, job.has_opened, job.has_left_last) == (7, 3, True, True)
    assert job.past_losses == [lost(0, 11)]
    assert [(one.came.incarnation, one.is_present, one.is_recovery) for one in job.workers.values()] == [
        (13, True, True),
        (12, False, False),
    ]
    assert RecordedJob.replay([RecordedEvent(JobEnded(0, "all workers have left"), 1)]).stop == JobEnded(
        0, "all workers have left"
    )


def test_a_loss_that_is_noticed_late_is_not_the_last_word() -> None:
    """Another process of that slot has joined since."""
    came_and_left = [came(0, 11, 1, (3, 0)), came(1, 12, 2, (3, 1)), RecordedEvent(MemberLeft("worker", 1, "h", 12), 3)]
    assert RecordedJob.replay([*came_and_left, RecordedEvent(lost(0, 11), 4)]).has_left_last
    came_and_left[1] = came(1, 12, 2, (4, 0))
    assert not RecordedJob.replay([*came_and_left, RecordedEvent(lost(0, 11), 4)]).has_left_last
