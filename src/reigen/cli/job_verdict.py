"""Verdict at the end of `reigen run`: what bounded the job, where it has written a timeline on this host."""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from reigen.errors import ReigenError
from reigen.launch.metrics.lines_file import append_verdict

#: A job of fewer steps, that was shorter than that, is not worth a word.
LEAST_STEPS, LEAST_SECONDS = 100, 10.0
#: As much of the file is read: a fraction of a second, however long the job was.
_MOST_BYTES = 8 << 20
_PREFIX = "verdict: "
_log = logging.getLogger(__name__)


def say_verdict(
    environ: Mapping[str, str], begun: float, say: Callable[[str], None], metrics_file: Path | None = None
) -> None:
    """Say what bounded a job that has ended well, in one to three lines, if there is something to say. Raises nothing.

    Args:
        environ: of its ranks.
        begun: when it was started (``time.time()``): an older file is not its own.
        say: shows one line to the user.
        metrics_file: of the job, in which the verdict becomes the last line, too; None: there is none.
    """
    path = timeline_path(environ)
    if path is None:
        return
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_mtime >= begun:
            lines = _describe(path, time.time() - begun)
            for line in lines:
                say(line)
            if lines and metrics_file is not None:
                append_verdict(metrics_file, "\n".join(lines).removeprefix(_PREFIX))
    except (OSError, ReigenError) as error:  # it was written elsewhere, or not to the end
        _log.debug("no verdict from %s: %s", path, error)
    except Exception:  # noqa: BLE001  whatever a file holds: the job was done, and its end is the same
        _log.debug("no verdict from %s", path, exc_info=True)


def timeline_path(environ: Mapping[str, str]) -> Path | None:
    """Return the file that ranks with this environment write a timeline to; None: they write none."""
    text = environ.get("REIGEN_TIMELINE") or environ.get("HOROVOD_TIMELINE") or ""
    return None if text in {"", "DYNAMIC"} else Path(text)


def _describe(path: Path, seconds: float) -> list[str]:
    from reigen.observe.summary import summarize  # loads NumPy
    from reigen.observe.trace_reader import read_trace
    from reigen.observe.verdict import Confidence

    summary = summarize(read_trace(path, _MOST_BYTES))
    num_steps = min((row.count for row in summary.steps), default=0)
    is_short = num_steps < LEAST_STEPS and seconds < LEAST_SECONDS
    if is_short or summary.verdict.confidence is Confidence.UNCLEAR:
        return []
    first, *more = summary.verdict.lines()
    return [f"{_PREFIX}{first} (reigen trace {path} says more)", *more]
