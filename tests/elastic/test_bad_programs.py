"""A program that is wrong in an elastic job: all end with an error that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.elastic_processes import ElasticProcesses
from tests.multiprocess.launcher import until

pytestmark = pytest.mark.slow

COUNTING = Path(__file__).with_name("counting_program.py")
UNPICKLABLE = Path(__file__).with_name("unpicklable_program.py")


def test_a_state_that_cannot_be_sent_is_named() -> None:
    with ElasticProcesses(UNPICKLABLE) as job:
        members = job.start_first(2)
        assert all(member.wait() == 1 for member in members)
    said = "\n".join(line for member in members for line in member.lines)
    problem = "the state's attribute connection cannot be given to other ranks (TypeError: a connection "
    assert problem + "cannot be pickled): keep what it can be made of in the state, and itself outside" in said


def test_a_program_that_catches_everything_ends_and_the_others_go_on() -> None:
    with ElasticProcesses(COUNTING, "100000000", "0.002", REIGEN_DEADLINE="2") as job:
        members = job.start_first(3, {1: {"CATCHES": "inf"}})
        job.wait_for("STEP 5 ")
        members[2].kill()
        assert members[1].wait() == 1
        assert members[1].says("has not come to view 2 of the job"), members[1].lines[-5:]
        until(lambda: sum(" 0 1 " in line for line in list(members[0].lines)) > 5)  # rank 0 of 1


def test_programs_that_catch_everything_on_all_ranks_end_by_name() -> None:
    with ElasticProcesses(COUNTING, "100000000", "0.002", REIGEN_DEADLINE="3", CATCHES="inf") as job:
        members = job.start_first(3)
        job.wait_for("STEP 5 ")
        members[0].kill()
        assert [member.wait() for member in members[1:]] == [1, 1]
    for member in members[1:]:
        (said,) = [line for line in member.lines if "this process ends" in line]
        assert "its program has not come to view 2 of the job: for " in said
        assert "have to leave the function that hvd.elastic.run calls: no `except` in it may catch them" in said


def test_a_program_that_cleans_up_before_it_lets_the_error_leave_goes_on() -> None:
    """More than a hundred calls are refused meanwhile."""
    with ElasticProcesses(COUNTING, "100000000", "0.002", REIGEN_DEADLINE="60", CATCHES="3") as job:
        members = job.start_first(3)
        job.wait_for("STEP 5 ")
        members[2].kill()
        until(lambda: all(sum(f" {rank} 2 " in line for line in list(members[rank].lines)) > 5 for rank in (0, 1)))
        assert all(member.says("CAUGHT") for member in members[:2])
        assert not any(member.says("this process ends") for member in members)
