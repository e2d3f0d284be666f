"""What came of a job, from what its processes said: messages in, verdict out."""

import pytest

from reigen.errors import DeadlineError, PeerLostError, ReigenError
from reigen.launch.job_state import ProcessExited
from reigen.runner.outcome import RankProcessDied, decide_outcome
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankReport
from reigen.runner.task import failure_report

FINE = LauncherFinished(None)


def raised(rank, **facts):
    return RankReport(rank, failed=True, exit_code=1, **facts)


def victim(rank):
    return raised(rank, is_victim=True)


def test_all_returned():
    messages = [RankReport(1), RankReport(0), ProcessExited(1, 0), ProcessExited(0, 0), FINE]
    assert decide_outcome(messages, 2) is None


def test_the_first_that_raised_by_itself():
    messages = [
        RankReport(2),
        victim(0),
        raised(3),
        raised(1),
        ProcessExited(0, 1),
        ProcessExited(1, 1),
        ProcessExited(3, 1),
        FINE,
    ]
    assert decide_outcome(messages, 4) == raised(3)


def test_a_rank_that_takes_its_time_to_end_is_still_the_culprit():
    messages = [raised(1), victim(0), ProcessExited(0, 1), ProcessExited(1, -15), FINE]
    assert decide_outcome(messages, 2) == raised(1)


@pytest.mark.parametrize("exit_code", [-9, 7, 0])
def test_a_silent_death_is_what_its_victims_died_of(exit_code):
    messages = [ProcessExited(1, exit_code), victim(0), ProcessExited(0, 1), FINE]
    assert decide_outcome(messages, 2) == RankProcessDied(1, exit_code, returned=False)
    assert decide_outcome([messages[1], messages[0], *messages[2:]], 2) == RankProcessDied(1, exit_code, returned=False)


def test_a_death_after_the_function_is_a_failure_too():
    assert decide_outcome([RankReport(0), ProcessExited(0, -11), FINE], 1) == RankProcessDied(0, -11, returned=True)


def test_whoever_the_launcher_stops_is_no_culprit():
    messages = [victim(0), ProcessExited(0, 1), ProcessExited(1, -15), FINE]  # rank 1 had left the job, and lived on
    assert decide_outcome(messages, 2) == victim(0)


def test_whoever_stops_the_launcher():
    assert decide_outcome([ProcessExited(0, -15), ProcessExited(1, -15), LauncherFinished(15)], 2) == LauncherFinished(
        15
    )


def test_a_launcher_that_could_not_do_its_part():
    assert decide_outcome([LauncherComplaint("no such command: x")], 2) == LauncherComplaint("no such command: x")
    assert decide_outcome([RankReport(0), RankReport(1)], 2) == LauncherComplaint("")
    assert decide_outcome([], 1) == LauncherComplaint("")


@pytest.mark.parametrize(
    ("error", "is_victim"),
    [
        (PeerLostError("rank 1 died"), True),
        (DeadlineError("rank 1 did not come"), False),
        (ValueError("own"), False),
    ],
)
def test_a_victim_is_known_however_the_function_puts_it(error, is_victim):
    for reraise in (None, RuntimeError("a cause is given"), KeyError("it came while the other was handled")):
        try:
            try:
                raise error
            except (ReigenError, ValueError) as first:
                if reraise is None:
                    raise
                if isinstance(reraise, RuntimeError):
                    raise reraise from first
                raise reraise  # noqa: B904
        except Exception as raised:  # noqa: BLE001  all three are meant
            assert failure_report(3, raised).is_victim == is_victim


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (3, 3), ("a text", 1), (256 + 7, 7)])
def test_the_exit_code_of_sys_exit(code, exit_code):
    report = failure_report(2, SystemExit(code))
    assert (report.rank, report.exit_code, report.failed) == (2, exit_code, True)


def test_a_server_that_fails_is_the_failure_and_not_the_ranks_that_were_stopped():
    ended = LauncherFinished(None, server_failure="server 0 failed first: killed by SIGKILL")
    messages = [ProcessExited(0, -15), ProcessExited(1, -15), ended]
    assert decide_outcome(messages, 2) == LauncherComplaint("server 0 failed first: killed by SIGKILL")
