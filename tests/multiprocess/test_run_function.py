"""`reigen.run`: results by rank, errors with rank and traceback, and nothing left behind."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import uuid

import numpy as np
import pytest

import reigen
from reigen.errors import LaunchError, PeerLostError, RankFailedError, UnsupportedTypeError
from tests.multiprocess.launcher import DEADLINE_SECONDS, MARK, marked, until

pytestmark = pytest.mark.slow  # many real processes


def place():
    return int(os.environ["REIGEN_RANK"]), int(os.environ["REIGEN_SIZE"])


@pytest.mark.slow
def test_results_by_rank_of_a_closure_and_its_job():
    base = np.arange(3.0)

    def func(factor, *, offset):
        import reigen.torch as hvd

        hvd.init()
        total = reigen.allreduce(base * hvd.rank(), op=reigen.Sum)
        return hvd.rank() * factor + offset, total, lambda: hvd.__name__

    results = reigen.run(func, (10,), {"offset": 5}, num_proc=3)
    assert [number for number, _, _ in results] == [5, 15, 25]
    for _, total, name in results:
        assert total.tolist() == [0.0, 3.0, 6.0]
        assert name() == "reigen.torch"


SCRIPT = """
import os, reigen, threading
class Mine(Exception):
    def __init__(self, one, two=0):
        super().__init__(one, two)
class Thing:
    def __init__(self, rank): self.rank = rank
def func(fail):
    rank = int(os.environ["REIGEN_RANK"])
    if fail and rank == 1:
        raise Mine("oops", 2) from KeyError("reason")
    return Thing(rank)
things = reigen.run(func, (False,), num_proc=2)
assert [type(each) is Thing and each.rank for each in things] == [0, 1]
try:
    reigen.run(func, (True,), num_proc=2)
except reigen.errors.RankFailedError as error:
    assert type(error.__cause__) is Mine and error.__cause__.args == ("oops", 2), repr(error.__cause__)
    assert (error.rank, error.exit_code, error.signum) == (1, 1, None)
    print(str(error).splitlines()[0], "KeyError: 'reason'" in error.traceback)
"""


@pytest.mark.slow
def test_classes_of_main_and_a_program_without_a_file():
    for command, given in ([sys.executable, "-c", SCRIPT], None), ([sys.executable, "-"], SCRIPT):
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
        assert (done.stdout, done.stderr) == ("rank 1 of 2 raised Mine: ('oops', 2) True\n", "")


def test_the_first_failure_wins_over_its_victims():
    def func():
        reigen.init()
        if reigen.rank() == 1:
            raise ValueError("the reason")
        try:
            reigen.allreduce(np.ones(3))
        except PeerLostError as error:
            raise RuntimeError("training failed") from error

    with pytest.raises(RankFailedError) as caught:
        reigen.run(func, num_proc=3)
    error = caught.value
    assert (error.rank, error.exit_code) == (1, 1)
    assert str(error).startswith("rank 1 of 3 raised ValueError: the reason\n\nTraceback (most recent call last):\n")
    assert 'raise ValueError("the reason")' in error.traceback
    assert "runner" not in error.traceback
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error, LaunchError)


def test_a_rank_that_is_killed():
    def func():
        reigen.init()
        if reigen.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reigen.allreduce(np.ones(3))

    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 was killed by SIGKILL, before the function ") as caught:
        reigen.run(func, num_proc=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.signum) == (1, 137, 9)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("leave", "exit_code", "message"),
    [
        (lambda: sys.exit(3), 3, "raised SystemExit: 3"),
        (lambda: sys.exit(0), 0, "raised SystemExit: 0"),
        (lambda: os._exit(0), 0, "exited with code 0, before the function returned"),
        (lambda: (__import__("atexit").register(os._exit, 9), 1)[1], 9, "exited with code 9, after the function had "),
        (threading.Lock, 1, r"raised .*what the function returned in rank 1 \(lock\) cannot be sent: TypeError"),
    ],
)
def test_ranks_without_a_result(leave, exit_code, message):
    def func():
        if place()[0] == 1:
            return leave()
        return 0 if exit_code == 0 and "exited" in message else signal.pause()

    with pytest.raises(RankFailedError, match=f"^rank 1 of 2 {message}") as caught:
        reigen.run(func, num_proc=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, exit_code)


def test_a_rank_that_failed_ends_though_its_threads_go_on(monkeypatch):
    def func():
        from reigen.runner import task

        task._LAST_SECONDS = 0.2
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("stop")

    with pytest.raises(RankFailedError, match="rank 0 of 1 raised ValueError: stop"):
        reigen.run(func)


def test_what_cannot_be_loaded():
    class Sticky:
        def __init__(self, where):
            self.where = where

        def __reduce__(self):
            return load, (self.where,)

    def load(where):
        if ("REIGEN_RANK" in os.environ) is (where == "rank"):
            raise ImportError("not here")
        return Sticky("caller")

    with pytest.raises(RankFailedError, match=r"raised ImportError: not here\n(.*\n)*reigen.run: .*cannot be loaded"):
        reigen.run(lambda _: None, (Sticky("rank"),))
    with pytest.raises(RankFailedError, match="returned in rank 1 of 2 cannot be loaded here: ImportError: not here"):
        reigen.run(lambda: Sticky("caller") if place()[0] else 0, num_proc=2)
    with pytest.raises(UnsupportedTypeError, match="one of its arguments, cannot be sent"):
        reigen.run(print, (threading.Lock(),))


def test_large_arguments_and_results():
    large = np.arange(8_000_000)  # 64 MB
    results = reigen.run(lambda array: array + place()[0], (large,), num_proc=2)
    for rank, result in enumerate(results):
        assert (result == large + rank).all()


def test_output_has_ranks_and_goes_where_the_caller_prints(tmp_path):
    def func():
        print("out", *place(), flush=True)
        print("err", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()  # no files: as in a notebook
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        reigen.run(func, num_proc=2, output_filename=tmp_path / "log", verbose=True)
    assert sorted(out.getvalue().splitlines()) == ["[0] out 0 2", "[1] out 1 2"]
    assert {"[0] err", "[1] err"} < set(err.getvalue().splitlines())
    assert "reigen run: rank 1: process" in err.getvalue()
    assert (tmp_path / "log" / "rank.1" / "stdout").read_text() == "out 1 2\n"


def test_from_threads_at_the_same_time_and_within_a_rank():
    def func(name):
        return [(name, *each) for each in reigen.run(place, num_proc=2)]  # a job inside a job

    results = {}

    def call(name):
        results[name] = reigen.run(func, (name,), num_proc=1)

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [[(name, 0, 2), (name, 1, 2)]] for name in "ab"}


def test_a_launcher_that_cannot_start_the_ranks(tmp_path):
    with pytest.raises(LaunchError, match=r"^no such command: /nonexistent/python$") as caught:
        reigen.run(place, executable="/nonexistent/python")
    assert caught.value.exit_code == 127
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot keep output in"):
        reigen.run(place, output_filename=tmp_path / "file")


PRINTS_MUCH = """
import reigen, resource, sys, warnings
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
with warnings.catch_warnings(record=True) as caught:
    result = reigen.run(lambda: print("much" * (1 << 19)) or 7, output_filename=sys.argv[1])
print("result", result, *(warning.message for warning in caught))
"""


def test_output_that_cannot_be_kept_to_the_end_does_not_end_the_job(tmp_path):
    """Files may have 1 MiB."""
    command = [sys.executable, "-c", PRINTS_MUCH, tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    kept = tmp_path / "rank.0" / "stdout"
    assert said.endswith(f"result [7] run(): {kept} is not complete: File too large\n")
    assert kept.stat().st_size == 1 << 20


def test_horovods_arguments():
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert reigen.run(place, np=2, hosts="localhost:2", executable=sys.executable) == [(0, 2), (1, 2)]
    with pytest.warns(UserWarning, match=r"^run\(\): no effect: use_gloo$"):
        assert reigen.run(place, use_gloo=True, ssh_port=22) == [(0, 1)]
    with pytest.raises(ValueError, match="two ways"):
        reigen.run(place, hosts="localhost", hostfile="file")


CALLER = """
import os, reigen, signal, sys, time
def func():
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1:] else signal.SIG_DFL)
    os.system("(setsid sleep 300 &)")
    print("ready", flush=True)
    time.sleep(300)
try:
    reigen.run(func, num_proc=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@contextlib.contextmanager
def calling(code):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert sorted(lines) == [b"[0] ready\n", b"[1] ready\n"]
        until(lambda: len(marked(mark)) == 7)  # caller, guard, supervisor, two ranks, two daemons
        yield process
        process.wait(DEADLINE_SECONDS)
        until(lambda: not marked(mark))
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.wait(DEADLINE_SECONDS)
        process.stdout.close()


def test_ctrl_c_in_the_caller_stops_the_job():
    with calling(CALLER) as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.read() == b"interrupted\n"


def test_a_second_ctrl_c_kills_what_does_not_stop():
    patient = (
        "import functools, reigen.runner.launcher_process as k; "
        "k.LaunchOptions = functools.partial(k.LaunchOptions, grace_seconds=300)\n"
    )
    with calling(patient + CALLER.replace("sys.argv[1:]", "True")) as process:

        def ended():
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        until(ended)


def test_a_killed_caller_leaves_nothing():
    with calling(CALLER) as process:
        process.kill()
