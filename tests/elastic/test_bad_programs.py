"""A program that is wrong in an elastic job: all end with an error that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.elastic_processes import ElasticProcesses

pytestmark = pytest.mark.slow

UNPICKLABLE = Path(__file__).with_name("unpicklable_program.py")


def test_a_state_that_cannot_be_sent_is_named() -> None:
    with ElasticProcesses(UNPICKLABLE) as job:
        members = job.start_first(2)
        assert all(member.wait() == 1 for member in members)
    said = "\n".join(line for member in members for line in member.lines)
    problem = "the state's attribute connection cannot be given to other ranks (TypeError: a connection "
    assert problem + "cannot be pickled): keep what it can be made of in the state, and itself outside" in said
