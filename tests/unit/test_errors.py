"""The classes by which scripts for Horovod catch errors."""

from __future__ import annotations

import pytest

from reigen.errors import CollectiveError, LaunchError, RankFailedError


@pytest.mark.parametrize("error", [CollectiveError, LaunchError, RankFailedError])
def test_what_ends_a_job_is_a_runtime_error(error):
    assert issubclass(error, RuntimeError)
    assert str(error("what happened")) == "what happened"
