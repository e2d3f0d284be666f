"""A process forks while MXNet's threads are about to leave Python.

MXNet joins its threads before a fork, with the interpreter's lock in the hands of the thread that forks: one that still
needs the lock would be waited for without end.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_DEADLINE_SECONDS = 60

#: an operation whose part on MXNet's thread takes its time after everybody has been told of its end
_PROGRAM = """
import os, sys, threading, time
import mxnet as mx
from reigen.mxnet.engine import get_engine_queue

told = threading.Event()

def linger(*_):
    told.set()
    time.sleep(0.3)

class Ending:
    def wait(self):
        pass

    def add_done_callback(self, callback):
        if sys.argv[1] == "forgetting":
            callback()  # here, on MXNet's thread, which forgets the operation, and lingers there
            return
        other = threading.Thread(target=callback)
        other.start()
        other.join()
        linger()

array = mx.nd.ones((10,))
get_engine_queue().push(Ending, [], [array], 0, "lingering", linger if sys.argv[1] == "forgetting" else None)
assert told.wait(20)
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (array + 1).asnumpy()[0] == 2
print("forked")
"""


@pytest.mark.parametrize("where", ["beginning", "forgetting"])
def test_a_fork_waits_for_threads_that_are_in_python(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, where], capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "forked\n"), done.stderr
