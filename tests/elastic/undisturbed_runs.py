"""Runs without deaths, beside which jobs with deaths are held: of reigen.torch, whose checkpoints are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.elastic.elastic_processes import ElasticProcesses
from tests.elastic.fork_server import ForkServer
from tests.elastic.step_ledger import Ledger, finish, segments


def check_undisturbed(
    ledger: Ledger,
    server: ForkServer,
    checkpoints: Path,
    amount: tuple[int, int],
    variables: Callable[[int], dict[str, str]],
) -> None:
    """Make each run of steps with the same members again, undisturbed, and compare weights and all that is saved.

    Args:
        ledger: of the job with deaths.
        server: starts processes.
        checkpoints: the job's directory, with one of each step; those of runs come beside it.
        amount: epochs, and samples of each.
        variables: of a run with so many ranks.
    """
    for begin, end, size in segments(ledger):
        again = checkpoints.with_name(str(begin))
        again.mkdir()
        more = {"RESUME": str(checkpoints / f"{begin}.pt"), "UNTIL": str(end), "CHECKPOINTS": str(again)}
        with ElasticProcesses(*map(str, amount), "0", server=server, **more, **variables(size)) as job:
            finish(job, job.start_first(size))
            undisturbed = Ledger()
            undisturbed.read(job.members)
        for number in range(begin, end):
            (expected,) = undisturbed.digests[number, 1]
            assert ledger.digests[number, max(ledger.views[number])] == {expected}, (number, size)
        found, expected_state = (torch.load(path / f"{end}.pt", weights_only=True) for path in (checkpoints, again))
        assert repr(found) == repr(expected_state)
