"""`reigen server`: a server of a job with parameter servers, without the program that its workers run."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.cli.kv_role import serve_role


def main(arguments: Sequence[str]) -> int:
    """Serve until the job is over; returns the exit code."""
    return serve_role("server", "A parameter server holds values that workers push to and pull from.", arguments)
