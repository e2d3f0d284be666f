"""The launcher's decisions: event in, instructions out."""

import random
from signal import SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from reigen.launch.job import (
    Exited,
    Failure,
    Finish,
    GraceOver,
    HostLost,
    Job,
    Kill,
    Orphaned,
    Phase,
    SignalReceived,
    StartGrace,
    Sweep,
    Swept,
    Terminate,
)

END = [Sweep(), StartGrace()]


def test_everybody_succeeds():
    job = Job(2)
    assert job.handle(Exited(1, 0)) == []
    assert job.handle(Exited(0, 0)) == END
    assert job.handle(Swept()) == [Finish(0, None, None)]


def test_an_early_success_is_not_a_failure():
    job = Job(3)
    assert job.handle(Exited(0, 0)) == []
    assert job.handle(Exited(2, 0)) == []
    assert job.phase is Phase.RUNNING
    assert job.running == {1}


def test_the_first_failure_stops_the_others_and_gives_the_exit_code():
    job = Job(4)
    assert job.handle(Exited(3, 0)) == []
    assert job.handle(Exited(2, 7)) == [Terminate((0, 1)), StartGrace()]
    assert job.handle(Exited(0, -SIGTERM)) == []
    assert job.handle(Exited(1, 9)) == END
    assert job.handle(Swept()) == [Finish(7, Failure(2, 7, num_stopped=2), None)]


def test_a_rank_that_a_signal_ended_gives_128_plus_its_number():
    job = Job(1)
    assert job.handle(Exited(0, -SIGSEGV)) == END
    assert job.handle(Swept()) == [Finish(139, Failure(0, -SIGSEGV, num_stopped=0), None)]


def test_the_last_rank_to_fail_stops_nobody():
    job = Job(2)
    assert job.handle(Exited(0, 0)) == []
    assert job.handle(Exited(1, 3)) == END


def test_whoever_does_not_stop_is_killed():
    job = Job(3)
    job.handle(Exited(0, 1))
    job.handle(Exited(1, -SIGTERM))
    assert job.handle(GraceOver()) == [Kill((2,)), StartGrace()]
    assert job.handle(Exited(2, -SIGKILL)) == END
    assert job.handle(Swept()) == [Finish(1, Failure(0, 1, num_stopped=2), None)]


def test_what_ranks_left_behind_is_killed_after_the_grace_time():
    job = Job(1)
    assert job.handle(Exited(0, 0)) == END
    assert job.handle(GraceOver()) == [Kill(()), StartGrace()]
    assert job.handle(Swept()) == [Finish(0, None, None)]


def test_what_cannot_be_killed_is_not_waited_for():
    job = Job(2)
    job.handle(Exited(0, 1))
    job.handle(GraceOver())
    assert job.handle(GraceOver()) == [Finish(1, Failure(0, 1, num_stopped=1), None)]


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_stops_everybody(signum):
    job = Job(2)
    assert job.handle(SignalReceived(signum, 10.0)) == [Terminate((0, 1)), StartGrace()]
    assert job.handle(Exited(0, 0)) == []
    assert job.handle(Exited(1, 5)) == END
    assert job.handle(Swept()) == [Finish(128 + signum, None, signum)]


def test_a_lost_host_is_a_failure_of_its_ranks():
    job = Job(4)
    job.handle(Exited(2, 0))
    assert job.handle(HostLost((2, 3), "unplugged")) == [Terminate((0, 1)), StartGrace()]
    job.handle(Exited(0, -SIGTERM))
    assert job.handle(Exited(1, -SIGTERM)) == END
    assert job.handle(Swept()) == [Finish(255, Failure(3, 255, num_stopped=2, reason="unplugged"), None)]


def test_a_host_that_is_lost_with_nothing_left_to_do_there_changes_nothing():
    job = Job(2)
    job.handle(Exited(1, 0))
    assert job.handle(HostLost((1,), "switched off")) == []
    assert job.handle(Exited(0, 0)) == END


def test_a_host_that_is_lost_while_the_job_stops_is_not_waited_for():
    job = Job(2)
    job.handle(Exited(0, 4))
    assert job.handle(HostLost((1,), "switched off")) == END
    assert job.handle(Swept()) == [Finish(4, Failure(0, 4, num_stopped=1), None)]


def test_a_second_ctrl_c_kills_at_once():
    job = Job(2)
    job.handle(SignalReceived(SIGINT, 10.0))
    assert job.handle(SignalReceived(SIGINT, 10.5)) == [Kill((0, 1)), StartGrace()]


def test_ctrl_c_while_a_failure_is_being_dealt_with_kills_and_keeps_the_exit_code():
    job = Job(2)
    job.handle(Exited(0, 4))
    assert job.handle(SignalReceived(SIGINT, 10.0)) == [Kill((1,)), StartGrace()]
    job.handle(Exited(1, -SIGKILL))
    assert job.handle(Swept()) == [Finish(4, Failure(0, 4, num_stopped=1), None)]


def test_one_request_that_arrives_twice_does_not_kill():
    job = Job(2)
    job.handle(SignalReceived(SIGINT, 10.0))
    assert job.handle(SignalReceived(SIGINT, 10.01)) == []
    job = Job(2)
    job.handle(SignalReceived(SIGTERM, 10.0))
    assert job.handle(SignalReceived(SIGTERM, 13.0)) == []


def test_an_orphaned_launcher_kills_everything():
    job = Job(2)
    assert job.handle(Orphaned()) == [Kill((0, 1)), StartGrace()]
    job.handle(Exited(0, -SIGKILL))
    assert job.handle(Exited(1, -SIGKILL)) == END
    assert job.handle(Swept()) == [Finish(137, None, SIGKILL)]


def test_nothing_happens_after_the_end():
    job = Job(1)
    job.handle(Exited(0, 0))
    job.handle(Swept())
    assert job.handle(SignalReceived(SIGINT, 1.0)) == job.handle(GraceOver()) == job.handle(Orphaned()) == []


def test_whatever_happens_every_job_ends_with_one_exit_code():
    """Random schedules; the exit code is found a second time from the history of events."""
    for seed in range(3000):
        rng = random.Random(seed)
        num_ranks = rng.randint(1, 5)
        history, finishes = run_schedule(num_ranks, rng)
        assert len(finishes) == 1
        assert finishes[0].exit_code == expected_exit_code(num_ranks, history), f"seed {seed}: {history}"


def run_schedule(num_ranks, rng):
    job, history, finishes = Job(num_ranks), [], []
    alive, timer_runs = set(range(num_ranks)), False
    while not finishes:
        choices = [Exited(rank, rng.choice([0, 0, 1, 3, -9])) for rank in alive]
        choices += [SignalReceived(rng.choice([SIGINT, SIGTERM]), float(len(history)))] if rng.random() < 0.2 else []
        choices += [GraceOver()] if timer_runs else []
        choices += [Orphaned()] if rng.random() < 0.02 else []
        choices += [] if alive else [Swept()]
        choices += [HostLost(tuple(rng.sample(range(num_ranks), 1)), "cut")] if rng.random() < 0.1 else []
        event = rng.choice(choices)
        if isinstance(event, Exited):
            alive.discard(event.rank)
        elif isinstance(event, HostLost):
            alive.difference_update(event.ranks)
        history.append(event)
        for instruction in job.handle(event):
            timer_runs |= isinstance(instruction, StartGrace)
            finishes += [instruction] if isinstance(instruction, Finish) else []
        job.validate()
        assert job.running == alive
        assert len(history) < 200
    return history, finishes


def expected_exit_code(num_ranks, history):
    running = set(range(num_ranks))
    for event in history:
        match event:
            case Exited(_, code) if code != 0:
                return code if code > 0 else 128 - code
            case Exited(rank, _):
                running.discard(rank)
            case HostLost(ranks, _) if running.intersection(ranks):
                return 255
            case SignalReceived(signum, _) if running:
                return 128 + signum
            case Orphaned() if running:
                return 137
    return 0
