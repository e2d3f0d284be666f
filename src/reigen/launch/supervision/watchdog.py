"""Watchdog over the launcher, so that nothing a job starts outlives it, however it ends.

The command that the user sees forks once. The child, the *supervisor*, is the parent of the ranks and does the work,
in a session of its own, so that a terminal's signals reach it one way only. The parent, the *watchdog*, hands on the
signals that it is sent, waits, and exits with the supervisor's exit code. Both take in orphans (subreaper), so a
process below them stays below them. Then:

a. The watchdog is killed: its end of a pipe to the supervisor closes; the supervisor kills everything below it.
b. The supervisor is killed: the kernel kills the ranks (parent-death signal), the watchdog everything else below it.
c. Both are killed at once: the kernel kills the ranks. Only in this case do processes survive that ranks have started.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable

from reigen.errors import LaunchError, ReigenError
from reigen.launch.supervision.process_tree import become_subreaper, kill_all_below, signal_name
from reigen.resources.limits import explain_limit

#: Signals that ask a job to stop. SIGHUP only where it is not ignored: nohup(1) says that it shall not matter.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals that mean something to the ranks, as with mpirun and srun: engines announce the end of a job by them.
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

_LAST_SECONDS = 5.0
_INTERNAL_ERROR_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: our own bug


def run_under_watchdog(
    work: Callable[[int], int], complain: Callable[[str], None], describe_loss: Callable[[], str] = str
) -> int:
    """Run ``work`` in a supervisor process under a watchdog.

    To be called before any thread is started, as the last thing that a process does: it gets no stop signal after it.

    Args:
        work: gets the pipe: a descriptor from which it reads the numbers of the signals that the watchdog was sent,
            one byte each, and the end of file when the watchdog has gone. Returns the exit code.
        complain: prints a line for the user.
        describe_loss: returns what follows from a violent end of the supervisor, for the user; empty: nothing.

    Returns:
        The exit code of ``work``, that of a LaunchError it raised, or 128 + n if a signal n ended the supervisor.

    Raises:
        OSError: the kernel refused a process.
    """
    become_subreaper()
    watchdog_pipe, sender = os.pipe()
    os.set_blocking(sender, False)
    handled = [signum for signum in (*STOP_SIGNALS, *PASSED_SIGNALS) if _is_handled(signum)]
    for signum in handled:
        signal.signal(signum, lambda *_: None)  # the interpreter has written its number to the wake-up descriptor
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(work, complain, watchdog_pipe, sender)
    _, status = os.waitpid(supervisor, 0)
    # The exit code stands. Another signal must not change it while the interpreter ends.
    signal.set_wakeup_fd(-1)
    for signum in handled:
        signal.signal(signum, signal.SIG_IGN)
    os.close(watchdog_pipe)
    os.close(sender)
    num_killed = kill_all_below(_LAST_SECONDS)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    loss = describe_loss()
    killed = f"{num_killed} process{'es were' if num_killed != 1 else ' was'} killed"
    complain(f"the supervising process was ended by {signal_name(-code)}; {killed}" + (f"; {loss}" if loss else ""))
    return 128 - code


def _supervise(work: Callable[[int], int], complain: Callable[[str], None], watchdog_pipe: int, sender: int) -> None:
    """Run the supervisor. Never returns: the frames above on the stack belong to the watchdog."""
    code = _INTERNAL_ERROR_EXIT_CODE
    try:
        os.setsid()
        become_subreaper()
        signal.set_wakeup_fd(-1)
        os.close(sender)
        code = work(watchdog_pipe)
    except ReigenError as error:
        complain(str(error))
        code = error.exit_code if isinstance(error, LaunchError) else 1
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:  # it can come from anywhere
            complain(f"the launcher cannot go on: {explain_limit(error).strerror}")
            code = 1
        else:
            traceback.print_exc()
    except BaseException:  # noqa: BLE001  nothing may unwind into the watchdog's frames
        traceback.print_exc()
    finally:
        try:
            kill_all_below(_LAST_SECONDS)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # without a descriptor it cannot look who is there; the watchdog kills them
            os._exit(code)


def _is_handled(signum: int) -> bool:
    return signum in {signal.SIGINT, signal.SIGTERM} or signal.getsignal(signum) is not signal.SIG_IGN
