"""Python processes that begin with a framework imported: a test that starts many of them imports it once.

`server.py` imports it, and forks whenever a client asks. `client.py` is what a test starts in place of Python: it hands
its arguments, its environment and its descriptors over, passes on signals, and ends as the forked process ends.

Not for tests of how Python starts or imports, and not for what reads the environment when it is imported.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from reigen.testing import Resources

_HERE = Path(__file__).parent


#: What runs, and ends with the session.
_RUNNING: dict[str, WarmPython] = {}


def warm_python(name: str, modules: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return what stands in place of Python in a command line; the first call for a name starts its server."""
    if name not in _RUNNING:
        _RUNNING[name] = WarmPython(modules, environ)
    return _RUNNING[name].command


def resources() -> Resources:
    """Return what outlives a test on purpose."""
    running = _RUNNING.values()
    return Resources(frozenset(each.descriptor for each in running), frozenset(each.pid for each in running))


def close_all() -> None:
    """End all servers."""
    while _RUNNING:
        _RUNNING.popitem()[1].close()


class WarmPython:
    """A server of processes that have imported some modules; it ends with this process, or when it is closed.

    Args:
        modules: what is imported, in order; one that is not installed is left out.
        environ: of the server. Variables that are read by imports have to be the same in its processes.
    """

    def __init__(self, modules: list[str], environ: Mapping[str, str]) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._address = str(Path(self._directory.name) / "server")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(64)
        kept, self._alive = os.pipe()  # its end of file tells the server that this process is gone
        with listener:
            self._server = subprocess.Popen(
                [sys.executable, str(_HERE / "server.py"), str(listener.fileno()), str(kept), *modules],
                env=dict(environ),
                pass_fds=[listener.fileno(), kept],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        os.close(kept)

    @property
    def descriptor(self) -> int:
        """By whose closing the server ends."""
        return self._alive

    @property
    def pid(self) -> int:
        """The server."""
        return self._server.pid

    @property
    def command(self) -> list[str]:
        """What stands in place of Python in a command line; a script and its arguments follow."""
        return [sys.executable, "-I", "-S", str(_HERE / "client.py"), self._address]

    def close(self) -> None:
        """End the server; processes that it has forked go on."""
        os.close(self._alive)
        self._server.wait()
        self._directory.cleanup()
