"""`reigen run` is stopped, killed, or left alone by its reader: no process may survive it."""

import os
import pty
import signal
import subprocess
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSCTTY

import pytest

from tests.multiprocess.launcher import DEADLINE_SECONDS, launched, python, until

pytestmark = pytest.mark.slow

# Each rank has a child in its session and a daemon that has left it, as badly behaved scripts have.
FAMILY = ("sh", "-c", "(setsid sleep 300 &); sleep 300 & echo ready; wait")
STUBBORN = python("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)")


def ready(launcher, num_ranks=2):
    assert sorted(launcher.lines(num_ranks)) == [f"[{rank}] ready" for rank in range(num_ranks)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(signum):
    with launched("-np", "2", *FAMILY) as launcher:
        ready(launcher)
        until(lambda: len(launcher.processes()) == 8)
        launcher.process.send_signal(signum)
        assert launcher.finish() == (128 + signum, "", f"reigen run: stopped by {signum.name}\n")


HEARING = python(
    "signal.signal(signal.SIGUSR1, lambda *_: print('heard', flush=True)); print('ready', flush=True); signal.pause();"
    "signal.pause()"
)


def test_a_signal_for_the_ranks_is_passed_on():
    with launched("-np", "2", *HEARING) as launcher:
        ready(launcher)
        launcher.process.send_signal(signal.SIGUSR1)
        assert sorted(launcher.lines(2)) == ["[0] heard", "[1] heard"]
        launcher.process.send_signal(signal.SIGTERM)
        status, _, err = launcher.finish()
    assert (status, err) == (143, "reigen run: SIGUSR1 is passed on to the ranks\nreigen run: stopped by SIGTERM\n")


def test_the_supervisor_hears_signals_too():
    with launched("-np", "2", *FAMILY) as launcher:
        ready(launcher)
        os.kill(launcher.supervisor(), signal.SIGTERM)
        assert launcher.finish()[0] == 143


def test_a_killed_launcher_leaves_nothing():
    with launched("-np", "2", *FAMILY) as launcher:
        ready(launcher)
        until(lambda: len(launcher.processes()) == 8)
        launcher.process.kill()
        until(lambda: not launcher.processes())


def test_a_killed_supervisor_leaves_nothing():
    with launched("-np", "2", *FAMILY) as launcher:
        ready(launcher)
        until(lambda: len(launcher.processes()) == 8)
        os.kill(launcher.supervisor(), signal.SIGKILL)
        status, _, err = launcher.finish()
    assert status == 137
    assert "the supervising process was ended by SIGKILL" in err


def test_a_supervisor_that_is_killed_as_soon_as_it_is_there():
    # by its own number: until it has a session of its own, its process group is that of the launcher
    for _ in range(3):
        with launched("-np", "2", *FAMILY) as launcher:
            children = Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children")
            until(lambda children=children: children.read_text())
            os.kill(launcher.supervisor(), signal.SIGKILL)
            status, _, err = launcher.finish()
        assert status == 137
        assert "the supervising process was ended by SIGKILL" in err


def test_both_killed_at_once_leave_no_rank():
    with launched("-np", "2", *STUBBORN) as launcher:
        ready(launcher)
        supervisor = launcher.supervisor()
        launcher.process.send_signal(signal.SIGSTOP)  # the guard cannot help now
        os.kill(supervisor, signal.SIGKILL)
        launcher.process.kill()
        until(lambda: not launcher.processes())


def test_whoever_ignores_sigterm_is_killed_after_the_grace_time():
    with launched("-np", "2", "--grace-seconds", "0.3", *STUBBORN) as launcher:
        ready(launcher)
        begin = time.monotonic()
        launcher.process.terminate()
        assert launcher.finish()[0] == 143
    assert time.monotonic() - begin >= 0.3


def test_a_failure_kills_the_stubborn_and_keeps_its_exit_code():
    code = "if rank == 0: print('ready', flush=True); os.read(0, 1); sys.exit(5)\n" + STUBBORN[2]
    with launched("-np", "2", "--grace-seconds", "0.2", *python(code), stdin=subprocess.PIPE) as launcher:
        ready(launcher)
        status, _, err = launcher.finish()
    assert status == 5
    assert err.endswith("1 other rank was stopped because of it\n")


def test_a_second_ctrl_c_kills_at_once():
    with launched("-np", "2", "--grace-seconds", "300", *STUBBORN) as launcher:
        ready(launcher)

        def ended():
            launcher.process.send_signal(signal.SIGINT)
            return launcher.process.poll() is not None

        until(ended)
        assert launcher.finish()[0] == 130


def test_the_first_of_two_failures_is_told_even_if_the_launcher_was_busy():
    with launched("-np", "2", *python("print(os.getpid(), flush=True); time.sleep(300)")) as launcher:
        pids = dict(line.split() for line in launcher.lines(2))
        supervisor = launcher.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        for rank in ("[1]", "[0]"):
            os.kill(int(pids[rank]), signal.SIGKILL)
            until(lambda rank=rank: int(pids[rank]) not in launcher.processes())
        os.kill(supervisor, signal.SIGCONT)
        status, _, err = launcher.finish()
    assert status == 137
    assert "rank 1 failed first: killed by SIGKILL" in err


def test_a_rank_that_is_stopped_can_still_be_ended():
    with launched("-np", "1", "--grace-seconds", "300", *python("print('ready', flush=True); time.sleep(300)")) as job:
        ready(job, 1)
        rank = next(pid for pid in job.processes() if pid not in {job.process.pid, job.supervisor()})
        os.kill(rank, signal.SIGSTOP)
        job.process.terminate()
        assert job.finish()[0] == 143


def test_a_launcher_whose_reader_is_stuck_still_hears_signals():
    with launched("-np", "2", "--grace-seconds", "0.2", "yes") as launcher:
        launcher.lines(1)
        launcher.process.terminate()
        launcher.process.wait(DEADLINE_SECONDS / 2)
        assert launcher.process.returncode == 143


def test_a_launcher_whose_reader_has_gone_ends_as_others_do():
    with launched("-np", "2", "yes") as launcher:
        launcher.lines(1)
        launcher.process.stdout.close()
        launcher.process.wait(DEADLINE_SECONDS)
        assert launcher.process.returncode == 128 + signal.SIGPIPE


class Terminal:
    """A pseudo terminal that is the launcher's stdin, stdout, stderr and controlling terminal."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        self.seen = b""

    def options(self):
        def own():
            ioctl(0, TIOCSCTTY, 0)

        return dict.fromkeys(("stdin", "stdout", "stderr"), self.slave) | {"start_new_session": True, "preexec_fn": own}

    def read_until(self, text):
        while text not in self.seen:
            self.seen += os.read(self.master, 4096)

    def close(self):
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.close()


def test_ctrl_c_at_a_terminal_stops_the_job_once(terminal):
    with launched("-np", "2", *FAMILY, **terminal.options()) as launcher:
        terminal.read_until(b"[0] ready")
        terminal.read_until(b"[1] ready")
        os.write(terminal.master, b"\x03")
        terminal.read_until(b"stopped by SIGINT")
        assert launcher.process.wait(DEADLINE_SECONDS) == 130


def test_progress_and_questions_of_rank_0_at_a_terminal(terminal):
    code = """
if rank == 0:
    for percent in (10, 20):
        sys.stderr.write(f'\\r{percent}%'); sys.stderr.flush()
        input()
    name = input('name? ')
    print('hello', name)
else:
    print('other')
"""
    with launched("-np", "2", *python(code), **terminal.options()) as launcher:
        terminal.read_until(b"\r[0] 10%\x1b[K")
        terminal.read_until(b"[1] other\r\n")
        os.write(terminal.master, b"\n")
        terminal.read_until(b"\r[0] 20%\x1b[K")
        os.write(terminal.master, b"\n")
        terminal.read_until(b"[0] name? ")
        os.write(terminal.master, b"bob\n")
        terminal.read_until(b"[0] name? hello bob\r\n")
        assert launcher.process.wait(DEADLINE_SECONDS) == 0
