"""Parallel environments of Grid Engine: their settings by qconf, and those that jobs of Reigen's need."""

from __future__ import annotations

from collections.abc import Mapping

from reigen.errors import LaunchError
from reigen.launch.submission import run_client

_QCONF_SECONDS = 10.0


def read_parallel_environment(name: str) -> dict[str, str]:
    """Read the settings of a parallel environment by ``qconf -sp``; raises LaunchError, in qconf's words."""
    return parse_settings(_qconf("-sp", name))


def list_parallel_environments() -> list[str]:
    """List the names of all parallel environments; raises LaunchError."""
    return _qconf("-spl").split()


def list_environments_of_queue(queue: str) -> list[str]:
    """List the parallel environments of a queue; raises LaunchError."""
    return parse_settings(_qconf("-sq", queue.partition("@")[0])).get("pe_list", "").replace(",", " ").split()


def parse_settings(text: str) -> dict[str, str]:
    """Parse lines of names and values; a backslash at its end continues a line."""
    lines = text.replace("\\\n", " ").splitlines()
    return {words[0]: " ".join(words[1:]) for line in lines if (words := line.split())}


def explain_parallel_environment(name: str, settings: Mapping[str, str]) -> str:
    """Explain the fault of a parallel environment; empty: jobs can run in it.

    job_is_first_task does not matter: nothing is started by qrsh on the first host, where the job's script runs.
    """
    if settings.get("control_slaves", "").upper() == "TRUE":
        return ""
    return (
        f"the parallel environment {name} has control_slaves FALSE, so qrsh starts nothing on other hosts: have an "
        f"administrator set it TRUE (qconf -mp {name}), use another one (qconf -spl), or --launcher ssh"
    )


def _qconf(*arguments: str) -> str:
    ended = run_client(["qconf", *arguments], timeout_seconds=_QCONF_SECONDS)
    if ended.returncode != 0:
        raise LaunchError(f"qconf {' '.join(arguments)}: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout
