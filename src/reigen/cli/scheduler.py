"""`reigen scheduler`: a scheduler of a job with parameter servers, without the program that its workers run."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.cli.kv_role import serve_role


def main(arguments: Sequence[str]) -> int:
    """Serve until the job is over; returns the exit code."""
    return serve_role(
        "scheduler", "The scheduler tells workers and servers where they are, and who of them is lost.", arguments
    )
