"""Log messages go to the standard library's logger ``reigen``; ``init()`` shows them on stderr as a last resort.

A program that has handlers of its own, on ``reigen`` or on the root logger, gets the messages through those, and they
are not shown twice. A level that the program has set on ``reigen`` stays. The root logger is never touched.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

TRACE = 5

_LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_NAMES = {number: name for name, number in _LEVELS.items()}


class _StderrHandler(logging.Handler):
    """Handler that writes to ``sys.stderr`` of the moment, unless another handler gets the same message."""

    level_set = logging.NOTSET

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        logger = logging.getLogger("reigen")
        handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else [])]
        if any(handler is not self for handler in handlers):
            return
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


class _Formatter(logging.Formatter):
    def __init__(self, place: str, *, hide_time: bool) -> None:
        time = "" if hide_time else "%(asctime)s.%(msecs)03d "
        super().__init__(f"{time}reigen %(level_word)s{place}: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Format one message, of one line or more."""
        record.level_word = _NAMES.get(record.levelno, record.levelname.lower())
        return super().format(record)


def attach(level: str, *, hide_time: bool = False, rank: int | None = None, node: str = "") -> None:
    """Show messages of at least ``level`` on stderr. Repeated calls replace earlier ones.

    Args:
        level: one of ``config.LOG_LEVELS``.
        hide_time: lines do not begin with the time.
        rank: in each line; None where there is one process, or where the launcher prefixes it.
        node: in each line of a process that is no rank, such as ``server 1``.
    """
    logging.addLevelName(TRACE, "TRACE")
    logger = logging.getLogger("reigen")
    handler = next((known for known in logger.handlers if isinstance(known, _StderrHandler)), None)
    if handler is None:
        handler = _StderrHandler()
        logger.addHandler(handler)
    place = f" {node}" if node else "" if rank is None else f" rank {rank}"
    handler.setFormatter(_Formatter(place, hide_time=hide_time))
    if logger.level in {logging.NOTSET, handler.level_set}:
        handler.level_set = _LEVELS[level]
        logger.setLevel(_LEVELS[level])
