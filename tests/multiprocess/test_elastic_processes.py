"""What tests of elastic jobs learn from their processes."""

from __future__ import annotations

import pytest

from tests.elastic.elastic_processes import ElasticProcesses


def test_who_waits_for_a_line_hears_of_processes_that_have_ended_without_it() -> None:
    """At once, with what they have said; whoever has said it may have ended since."""
    with ElasticProcesses("-c", "print('first'); raise SystemExit(3)") as job:
        job.start_first(1)
        job.wait_for("first")
        with pytest.raises(AssertionError, match=r"'second' is not said by \(exit codes\) \{0: 3\}: \[0\] first"):
            job.wait_for("second", seconds=600)
