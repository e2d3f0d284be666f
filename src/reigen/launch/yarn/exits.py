"""Explanations of how containers and applications of YARN end, from exit statuses and YARN's diagnostics. Pure."""

from __future__ import annotations

import re

from reigen.launch.base import HostProblem

#: ``ContainerExitStatus`` of Hadoop.
_STATUSES = {
    -100: ("YARN has released it: its node was lost, or it was given back", ""),
    -101: ("its node has no good disk left", "see the NodeManager's log there"),
    -102: ("YARN has preempted it: another queue was owed what it had", "submit to a queue that is not preempted"),
    -103: ("YARN has killed it: it used more virtual memory than it may", "yarn.nodemanager.vmem-pmem-ratio"),
    -104: ("YARN has killed it: it used more memory than it has", "ask for more: --worker-memory, --server-memory"),
    -105: ("the application's master has ended it", ""),
    -106: ("the ResourceManager has ended it", ""),
    -107: ("the application has ended", ""),
    -108: ("YARN's scheduler has shrunk it away", ""),
    -1000: ("it could not be started: its files could not be brought there, or its node refused", ""),
}
_SIGNALS = {
    137: ("it was killed (SIGKILL): by YARN, by the kernel for lack of memory, or by a user", ""),
    143: ("it was asked to end (SIGTERM): by YARN, or by a user", ""),
}
#: The master's own words in the application's diagnostics.
_EXIT_CODE = re.compile(r"exit code (\d+) of reigen launch(?:: (.*))?", re.DOTALL)
_MASTER_EXIT = re.compile(r"exited with\s+exitCode: (-?\d+)")
_TIME = re.compile(r"^\[[-\d:. ]+\]")
_STACK = re.compile(r"^\s*(at |\.\.\. \d+ more|Shell output|Stack trace|Exception from|Container id|Exit code)")


def explain_container(host: str, status: int, diagnostics: str) -> HostProblem:
    """Explain the end of an agent's container."""
    what, advice = _STATUSES.get(status) or _SIGNALS.get(status) or (f"it has ended with exit code {status}", "")
    words = summarize_diagnostics(diagnostics)
    return HostProblem(host, f"its container has ended: {what}" + (f" ({words})" if words else ""), advice)


def summarize_diagnostics(text: str) -> str:
    """Return the lines of YARN's diagnostics that say something, as one, without traces of calls."""
    lines = [_TIME.sub("", line) for line in text.splitlines()]
    words = [" ".join(line.split()) for line in lines if line.strip() and not _STACK.match(line)]
    found = "; ".join(dict.fromkeys(words))
    return found if len(found) <= 400 else found[:400] + " ..."


def master_diagnostics(exit_code: int, message: str = "") -> str:
    """Return the master's last words to YARN: the diagnostics of its application."""
    return f"exit code {exit_code} of reigen launch" + (f": {message}" if message else "")


def explain_application(state: str, final_status: str, diagnostics: str) -> tuple[int | None, str]:
    """Return the exit code of an application that has ended, None if it has none, and why, where that is news."""
    if match := _EXIT_CODE.search(diagnostics):
        return int(match[1]), ""
    if state == "KILLED":
        return 143, f"it was killed ({summarize_diagnostics(diagnostics) or 'YARN does not say by whom'})"
    if match := _MASTER_EXIT.search(diagnostics):
        status = int(match[1])
        what, advice = _STATUSES.get(status) or _SIGNALS.get(status) or (f"exit code {status}", "")
        return (status if 0 < status < 256 else 1), f"its master has ended: {what}{'; ' if advice else ''}{advice}"
    if state == "FINISHED" and final_status == "SUCCEEDED":
        return 0, ""
    return None, summarize_diagnostics(diagnostics) or f"its state is {state}, {final_status}"
