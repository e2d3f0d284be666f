"""The launcher's decisions: event in, instructions out."""

import random
from signal import SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM, SIGUSR1, SIGUSR2

import pytest

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from reigen.launch.job_state import (
    FinishJob,
    GraceExpired,
    HostLost,
    JobFailure,
    JobPhase,
    JobState,
    KillProcesses,
    ProcessesSwept,
    ProcessExited,
    PsWorkerLeft,
    RestartProcess,
    SignalProcesses,
    SignalReceived,
    StartGraceTimer,
    SweepProcesses,
    TerminateProcesses,
    WatchdogLost,
)

END = [SweepProcesses(), StartGraceTimer()]


def test_everybody_succeeds():
    job = JobState(2)
    assert job.handle(ProcessExited(1, 0)) == []
    assert job.handle(ProcessExited(0, 0)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_an_early_success_is_not_a_failure():
    job = JobState(3)
    assert job.handle(ProcessExited(0, 0)) == []
    assert job.handle(ProcessExited(2, 0)) == []
    assert job.phase is JobPhase.RUNNING
    assert job.running == {1}


def test_the_first_failure_stops_the_others_and_gives_the_exit_code():
    job = JobState(4)
    assert job.handle(ProcessExited(3, 0)) == []
    assert job.handle(ProcessExited(2, 7)) == [TerminateProcesses((0, 1)), StartGraceTimer()]
    assert job.handle(ProcessExited(0, -SIGTERM)) == []
    assert job.handle(ProcessExited(1, 9)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(7, JobFailure(2, 7, num_stopped=2), None)]


def test_a_signal_for_the_ranks_is_passed_on_once_and_stops_nothing():
    job = JobState(2, {2: 1})
    assert job.handle(SignalReceived(SIGUSR1, 10.0)) == [SignalProcesses((0, 1), SIGUSR1)]
    assert job.handle(SignalReceived(SIGUSR1, 10.5)) == []  # of another host, at the same time
    assert job.handle(SignalReceived(SIGUSR2, 10.5)) == [SignalProcesses((0, 1), SIGUSR2)]
    assert job.handle(ProcessExited(0, 0)) == []
    assert job.handle(SignalReceived(SIGUSR1, 20.0)) == [SignalProcesses((1,), SIGUSR1)]
    assert job.handle(SignalReceived(SIGTERM, 30.0)) == [TerminateProcesses((1, 2)), StartGraceTimer()]
    assert job.handle(SignalReceived(SIGUSR1, 40.0)) == []


def test_a_rank_that_a_signal_ended_gives_128_plus_its_number():
    job = JobState(1)
    assert job.handle(ProcessExited(0, -SIGSEGV)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(139, JobFailure(0, -SIGSEGV, num_stopped=0), None)]


def test_the_last_rank_to_fail_stops_nobody():
    job = JobState(2)
    assert job.handle(ProcessExited(0, 0)) == []
    assert job.handle(ProcessExited(1, 3)) == END


def test_whoever_does_not_stop_is_killed():
    job = JobState(3)
    job.handle(ProcessExited(0, 1))
    job.handle(ProcessExited(1, -SIGTERM))
    assert job.handle(GraceExpired()) == [KillProcesses((2,)), StartGraceTimer()]
    assert job.handle(ProcessExited(2, -SIGKILL)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(1, JobFailure(0, 1, num_stopped=2), None)]


def test_what_ranks_left_behind_is_killed_after_the_grace_time():
    job = JobState(1)
    assert job.handle(ProcessExited(0, 0)) == END
    assert job.handle(GraceExpired()) == [KillProcesses(()), StartGraceTimer()]
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_what_cannot_be_killed_is_not_waited_for():
    job = JobState(2)
    job.handle(ProcessExited(0, 1))
    job.handle(GraceExpired())
    assert job.handle(GraceExpired()) == [FinishJob(1, JobFailure(0, 1, num_stopped=1), None)]


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_stops_everybody(signum):
    job = JobState(2)
    assert job.handle(SignalReceived(signum, 10.0)) == [TerminateProcesses((0, 1)), StartGraceTimer()]
    assert job.handle(ProcessExited(0, 0)) == []
    assert job.handle(ProcessExited(1, 5)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(128 + signum, None, signum)]


def test_a_lost_host_is_a_failure_of_its_ranks():
    job = JobState(4)
    job.handle(ProcessExited(2, 0))
    assert job.handle(HostLost((2, 3), "unplugged")) == [TerminateProcesses((0, 1)), StartGraceTimer()]
    job.handle(ProcessExited(0, -SIGTERM))
    assert job.handle(ProcessExited(1, -SIGTERM)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(255, JobFailure(3, 255, num_stopped=2, reason="unplugged"), None)]


def test_a_host_that_is_lost_with_nothing_left_to_do_there_changes_nothing():
    job = JobState(2)
    job.handle(ProcessExited(1, 0))
    assert job.handle(HostLost((1,), "switched off")) == []
    assert job.handle(ProcessExited(0, 0)) == END


def test_a_host_that_is_lost_while_the_job_stops_is_not_waited_for():
    job = JobState(2)
    job.handle(ProcessExited(0, 4))
    assert job.handle(HostLost((1,), "switched off")) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(4, JobFailure(0, 4, num_stopped=1), None)]


def test_a_second_ctrl_c_kills_at_once():
    job = JobState(2)
    job.handle(SignalReceived(SIGINT, 10.0))
    assert job.handle(SignalReceived(SIGINT, 10.5)) == [KillProcesses((0, 1)), StartGraceTimer()]


def test_ctrl_c_while_a_failure_is_being_dealt_with_kills_and_keeps_the_exit_code():
    job = JobState(2)
    job.handle(ProcessExited(0, 4))
    assert job.handle(SignalReceived(SIGINT, 10.0)) == [KillProcesses((1,)), StartGraceTimer()]
    job.handle(ProcessExited(1, -SIGKILL))
    assert job.handle(ProcessesSwept()) == [FinishJob(4, JobFailure(0, 4, num_stopped=1), None)]


def test_one_request_that_arrives_twice_does_not_kill():
    job = JobState(2)
    job.handle(SignalReceived(SIGINT, 10.0))
    assert job.handle(SignalReceived(SIGINT, 10.01)) == []
    job = JobState(2)
    job.handle(SignalReceived(SIGTERM, 10.0))
    assert job.handle(SignalReceived(SIGTERM, 13.0)) == []


def test_an_orphaned_launcher_kills_everything():
    job = JobState(2)
    assert job.handle(WatchdogLost()) == [KillProcesses((0, 1)), StartGraceTimer()]
    job.handle(ProcessExited(0, -SIGKILL))
    assert job.handle(ProcessExited(1, -SIGKILL)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(137, None, SIGKILL)]


def test_nothing_happens_after_the_end():
    job = JobState(1)
    job.handle(ProcessExited(0, 0))
    job.handle(ProcessesSwept())
    assert job.handle(SignalReceived(SIGINT, 1.0)) == job.handle(GraceExpired()) == job.handle(WatchdogLost()) == []


# ---------------------------------------------------------------- servants: 2 and 3 are servers, 4 is the scheduler


def job_with_servers(num_restarts=0):
    return JobState(2, {2: num_restarts, 3: num_restarts, 4: 3})


def test_servants_end_after_the_last_rank():
    job = job_with_servers()
    assert job.handle(ProcessExited(1, 0)) == []
    assert job.handle(ProcessExited(0, 0)) == [StartGraceTimer()]
    assert job.phase is JobPhase.ENDING
    assert job.handle(ProcessExited(4, 0)) == []
    assert job.handle(ProcessExited(2, 0)) == []
    assert job.handle(ProcessExited(3, 0)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_servants_that_do_not_end_are_asked_and_then_killed():
    job = job_with_servers()
    job.handle(ProcessExited(1, 0))
    job.handle(ProcessExited(0, 0))
    job.handle(ProcessExited(4, 0))
    assert job.handle(GraceExpired()) == [TerminateProcesses((2, 3)), StartGraceTimer()]
    job.handle(ProcessExited(2, -SIGTERM))
    assert job.handle(GraceExpired()) == [KillProcesses((3,)), StartGraceTimer()]
    assert job.handle(ProcessExited(3, -SIGKILL)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_how_servants_exit_after_the_last_rank_does_not_matter():
    job = job_with_servers(num_restarts=1)
    job.handle(ProcessExited(1, 0))
    job.handle(ProcessExited(0, 0))
    assert [job.handle(ProcessExited(number, 1)) for number in (2, 3, 4)] == [[], [], END]
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_a_servant_that_ends_early_with_success_ends_nothing():
    job = job_with_servers()
    assert [job.handle(ProcessExited(number, 0)) for number in (2, 3, 4)] == [[], [], []]
    assert job.phase is JobPhase.RUNNING
    job.handle(ProcessExited(0, 0))
    assert job.handle(ProcessExited(1, 0)) == END


def test_a_server_that_may_not_be_started_again_ends_the_job():
    job = job_with_servers()
    assert job.handle(ProcessExited(3, -SIGKILL)) == [TerminateProcesses((0, 1, 2, 4)), StartGraceTimer()]
    for number in (0, 1, 2):
        job.handle(ProcessExited(number, -SIGTERM))
    assert job.handle(ProcessExited(4, 1)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(137, JobFailure(3, -SIGKILL, num_stopped=2), None)]


def test_a_servant_that_hears_of_lost_ranks_before_they_have_ended_is_not_the_failure():
    job = job_with_servers()
    assert job.handle(ProcessExited(3, WORKERS_LOST_EXIT_CODE)) == [StartGraceTimer()]
    assert job.handle(ProcessExited(4, WORKERS_LOST_EXIT_CODE)) == []  # the timer is not started again
    assert job.phase is JobPhase.RUNNING
    assert job.handle(ProcessExited(1, 1)) == [TerminateProcesses((0, 2)), StartGraceTimer()]
    assert job.failure == JobFailure(1, 1, num_stopped=1)


def test_lost_ranks_that_do_not_end_are_stopped_after_the_grace_time():
    job = job_with_servers()
    job.handle(ProcessExited(2, WORKERS_LOST_EXIT_CODE))
    assert job.handle(GraceExpired()) == [TerminateProcesses((0, 1, 3, 4)), StartGraceTimer()]
    assert job.failure == JobFailure(2, WORKERS_LOST_EXIT_CODE, num_stopped=2)


def test_ranks_that_were_lost_and_end_well_do_not_make_the_job_succeed():
    job = job_with_servers()
    for number in (2, 3, 4):
        job.handle(ProcessExited(number, WORKERS_LOST_EXIT_CODE))
    assert job.handle(ProcessExited(0, 0)) == []
    assert job.handle(ProcessExited(1, 0)) == END
    failure = JobFailure(2, WORKERS_LOST_EXIT_CODE, num_stopped=0)
    assert job.handle(ProcessesSwept()) == [FinishJob(WORKERS_LOST_EXIT_CODE, failure, None)]


def test_a_servant_is_started_again_so_many_times_and_no_more():
    job = job_with_servers(num_restarts=2)
    assert job.handle(ProcessExited(2, -SIGKILL)) == [RestartProcess(2, 1, -SIGKILL)]
    assert job.handle(ProcessExited(4, 137)) == [RestartProcess(4, 1, 137)]
    assert job.handle(ProcessExited(2, -SIGSEGV)) == [RestartProcess(2, 2, -SIGSEGV)]
    assert job.running == {0, 1, 2, 3, 4}
    assert job.handle(ProcessExited(2, -SIGKILL)) == [TerminateProcesses((0, 1, 3, 4)), StartGraceTimer()]
    assert job.failure == JobFailure(2, -SIGKILL, num_stopped=2, num_restarts=2)


def test_a_servant_that_ends_by_itself_with_an_error_has_a_reason():
    job = job_with_servers(num_restarts=2)
    assert job.handle(ProcessExited(4, 1)) == [TerminateProcesses((0, 1, 2, 3)), StartGraceTimer()]
    assert job.failure == JobFailure(4, 1, num_stopped=2)


def test_nothing_is_started_again_once_the_job_ends():
    for event in (ProcessExited(0, 7), SignalReceived(SIGTERM, 0.0)):
        job = job_with_servers(num_restarts=2)
        job.handle(event)
        assert job.handle(ProcessExited(2, 1)) == []


def test_the_first_rank_that_fails_decides_although_servants_fail_because_of_it():
    job = job_with_servers()
    assert job.handle(ProcessExited(1, 5)) == [TerminateProcesses((0, 2, 3, 4)), StartGraceTimer()]
    for number in (2, 3, 4):
        job.handle(ProcessExited(number, 1))
    assert job.handle(ProcessExited(0, 1)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(5, JobFailure(1, 5, num_stopped=1), None)]


def test_a_lost_host_with_a_server_ends_the_job_although_servers_may_be_started_again():
    job = job_with_servers(num_restarts=2)
    assert job.handle(HostLost((2,), "unplugged")) == [TerminateProcesses((0, 1, 3, 4)), StartGraceTimer()]
    assert job.failure == JobFailure(2, 255, num_stopped=2, reason="unplugged")


def test_a_rank_that_servers_wait_for_is_started_again():
    job = JobState(2, {0: 1, 1: 1, 2: 0, 3: 3})
    assert job.handle(ProcessExited(1, -SIGKILL)) == [RestartProcess(1, 1, -SIGKILL)]
    assert job.handle(ProcessExited(1, 1)) == [TerminateProcesses((0, 2, 3)), StartGraceTimer()]
    assert job.failure == JobFailure(1, -SIGKILL, num_stopped=1, num_restarts=1), "the first failure"


def test_a_rank_that_has_left_the_servers_is_not_started_again():
    job = JobState(2, {0: 3, 1: 3, 2: 0, 3: 3})
    assert job.handle(PsWorkerLeft(1)) == []
    assert job.handle(ProcessExited(1, 3)) == [TerminateProcesses((0, 2, 3)), StartGraceTimer()]
    assert job.failure == JobFailure(1, 3, num_stopped=1)


def test_a_rank_that_was_started_again_and_left_then_is_not_again():
    job = JobState(2, {0: 3, 1: 3, 2: 0, 3: 3})
    job.handle(ProcessExited(1, 7))
    job.handle(PsWorkerLeft(1))
    job.handle(ProcessExited(1, 3))
    assert job.failure == JobFailure(1, 7, num_stopped=1, num_restarts=1)


def test_ranks_that_go_on_without_one_that_failed_give_its_exit_code():
    job = JobState(3, {3: 0, 4: 3}, continue_on_failure=True)
    assert job.handle(ProcessExited(1, 7)) == []
    assert job.handle(ProcessExited(2, 9)) == []
    assert job.handle(ProcessExited(0, 0)) == [StartGraceTimer()]
    assert job.handle(ProcessExited(3, 0)) == []
    assert job.handle(ProcessExited(4, 0)) == END
    assert job.handle(ProcessesSwept()) == [FinishJob(7, JobFailure(1, 7, num_stopped=0), None)]


def test_without_a_server_no_rank_goes_on():
    job = JobState(3, {3: 0, 4: 3}, continue_on_failure=True)
    job.handle(ProcessExited(1, 7))
    assert job.handle(ProcessExited(3, 1)) == [TerminateProcesses((0, 2, 4)), StartGraceTimer()]
    job = JobState(3, {3: 0, 4: 3}, continue_on_failure=True)
    assert job.handle(HostLost((1, 3), "unplugged")) == [TerminateProcesses((0, 2, 4)), StartGraceTimer()]
    assert job.failure == JobFailure(1, 255, num_stopped=2, reason="unplugged")


def test_when_the_last_rank_fails_nobody_goes_on():
    job = JobState(2, {2: 0, 3: 3}, continue_on_failure=True)
    job.handle(ProcessExited(1, 7))
    assert job.handle(ProcessExited(0, 9)) == [TerminateProcesses((2, 3)), StartGraceTimer()]
    assert job.failure == JobFailure(1, 7, num_stopped=0)


def test_a_signal_after_the_last_rank_hurries_the_servants_and_fails_nothing():
    job = job_with_servers()
    job.handle(ProcessExited(0, 0))
    job.handle(ProcessExited(1, 0))
    assert job.handle(SignalReceived(SIGINT, 10.0)) == [TerminateProcesses((2, 3, 4)), StartGraceTimer()]
    assert job.handle(SignalReceived(SIGINT, 11.0)) == [KillProcesses((2, 3, 4)), StartGraceTimer()]
    for number in (2, 3, 4):
        job.handle(ProcessExited(number, -SIGKILL))
    assert job.handle(ProcessesSwept()) == [FinishJob(0, None, None)]


def test_whatever_happens_every_job_ends_with_one_exit_code():
    """Random schedules; the exit code is found a second time from the history of events."""
    for seed in range(3000):
        rng = random.Random(seed)
        num_ranks = rng.randint(1, 5)
        num_servants, ranks_return = rng.choice([0, 0, 2, 3]), rng.random() < 0.2
        numbers = range(0 if ranks_return else num_ranks, num_ranks + num_servants)
        restarts, continue_on_failure = {number: rng.randint(0, 2) for number in numbers}, rng.random() < 0.2
        history, finishes = run_schedule(
            JobState(num_ranks, restarts, continue_on_failure=continue_on_failure), num_ranks, rng
        )
        assert len(finishes) == 1
        decisive = [each for each in history if not (isinstance(each, SignalReceived) and each.signum == SIGUSR1)]
        expected = expected_exit_code(num_ranks, restarts, decisive, continue_on_failure)
        assert finishes[0].exit_code == expected, f"seed {seed}: {history}"


def run_schedule(job, num_ranks, rng):
    history, finishes = [], []
    alive, timer_runs = set(job.running), False
    num_left = 0
    num_processes = len(alive)
    while not finishes:
        choices = [ProcessExited(rank, rng.choice([0, 0, 1, WORKERS_LOST_EXIT_CODE, -9])) for rank in alive]
        choices += (
            [SignalReceived(rng.choice([SIGINT, SIGTERM, SIGUSR1]), float(len(history)))] if rng.random() < 0.2 else []
        )
        choices += [GraceExpired()] if timer_runs else []
        choices += (
            [PsWorkerLeft(rng.choice(sorted(alive)))] if alive and num_left < num_ranks and rng.random() < 0.1 else []
        )
        choices += [WatchdogLost()] if rng.random() < 0.02 else []
        choices += [] if alive else [ProcessesSwept()]
        choices += [HostLost((rng.randrange(num_processes),), "cut")] if rng.random() < 0.1 else []
        event = rng.choice(choices)
        if isinstance(event, ProcessExited):
            alive.discard(event.rank)
        elif isinstance(event, HostLost):
            alive.difference_update(event.ranks)
        num_left += isinstance(event, PsWorkerLeft)
        history.append(event)
        for instruction in job.handle(event):
            timer_runs |= isinstance(instruction, StartGraceTimer)
            finishes += [instruction] if isinstance(instruction, FinishJob) else []
            if isinstance(instruction, RestartProcess):
                alive.add(instruction.number)
        job.validate()
        assert job.running == alive
        assert len(history) < 200
    return history, finishes


def code_of(code):
    return [code if code > 0 else 128 - code] if code else []


def expected_exit_code(num_ranks, restarts, history, continue_on_failure):
    running, restarts, codes, rumours = {*range(num_ranks), *restarts}, dict(restarts), [], []
    first = {}
    for event in history:
        if not running.intersection(range(num_ranks)):
            break
        match event:
            case PsWorkerLeft(number) if number < num_ranks:
                restarts[number] = 0
            case ProcessExited(number, code) if (
                code != 0 and restarts.get(number, 0) and (number < num_ranks or code < 0)
            ):
                restarts[number] -= 1
                first.setdefault((number, number < num_ranks), code)
            case ProcessExited(number, code) if code == WORKERS_LOST_EXIT_CODE and number >= num_ranks:
                running.discard(number)
                rumours.append(code)
            case GraceExpired() if rumours:
                break
            case ProcessExited(number, code):
                running.discard(number)
                codes += code_of(code and first.get((number, True), code))
                if codes and not (continue_on_failure and number < num_ranks):
                    break
            case HostLost(numbers, _) if running.intersection(numbers):
                running.difference_update(numbers)
                codes.append(255)
                if not (continue_on_failure and max(numbers) < num_ranks):
                    break
            case SignalReceived() | WatchdogLost():
                codes.append(137 if event == WatchdogLost() else 128 + event.signum)
                break
    return (codes + rumours + [0])[0]
