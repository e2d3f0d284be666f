"""Stop signals of a node before its launcher, or its agent, handles them itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from reigen.errors import LaunchError
from reigen.launch.supervision.process_tree import signal_name
from reigen.launch.supervision.watchdog import STOP_SIGNALS


@contextmanager
def stop_by_signals() -> Iterator[None]:
    """Have a stop signal raise LaunchError, with exit code 128 + n.

    For process 1 of a container a signal without a handler is none: the container would have to be killed after its
    grace. Handlers that others install meanwhile stay.
    """
    # nohup(1) says that SIGHUP shall not matter
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


def _stop(signum: int, _frame: object) -> None:
    raise LaunchError(f"stopped by {signal_name(signum)}", 128 + signum)
