"""The decision whether TensorFlow can have operations of our own in this process.

They rely on what the C API does not promise (`kernels`). So they are used with the versions of TensorFlow with which
the tests have run, and with another one after a self-test in a process of its own has succeeded. Its verdict is kept in
the user's directory for caches, for this build of TensorFlow.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import sysconfig
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import tensorflow as tf

from reigen import context
from reigen._version import __version__
from reigen.config import load_config
from reigen.files import write_atomically
from reigen.tensorflow.native.c_api import library_path

#: Versions with which the tests have run.
TESTED_VERSIONS = ("2.16.2", "2.21.0")
_TESTED_MACHINES = ("x86_64",)
_SELF_TEST_SECONDS = 120.0
_OK = "ok"


def judge() -> str | None:
    """Return why there can be no operations of our own; None: there can."""
    config = context.current().config if context.is_initialized() else load_config(os.environ)
    if config.tensorflow_native == "0":
        return "REIGEN_TENSORFLOW_NATIVE=0"
    if config.tensorflow_native == "1" or _is_tested(tf.__version__, platform.machine()):
        return None
    return _remembered_verdict()


def _is_tested(version: str, machine: str) -> bool:
    return version in TESTED_VERSIONS and machine in _TESTED_MACHINES and sys.platform == "linux"


@functools.cache
def _remembered_verdict() -> str | None:
    """Return the verdict of the self-test of this build: the kept one, if there is one."""
    path = _verdict_path()
    with suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, str):
            return None if kept == _OK else kept
    verdict = _run_self_test()
    with suppress(OSError):  # then it is tested again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(verdict or _OK).encode()], mode=0o600)
    return verdict


def _verdict_path() -> Path:
    """Return the file for the verdict on this build, with these operations, in this interpreter."""
    library = library_path()
    with suppress(OSError):
        status = library.stat()
        facts = [str(library), status.st_size, status.st_mtime_ns, tf.__version__, __version__]
        facts += [sysconfig.get_config_var("SOABI"), platform.libc_ver()]
        digest = blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "reigen" / f"tensorflow-{digest}.json"
    return Path(os.devnull)


def _run_self_test() -> str | None:
    """Run it in a process of its own; returns what is wrong, or None."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("REIGEN_", "HOROVOD_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "reigen.tensorflow.native.self_test"]
    try:
        done = subprocess.run(
            command, check=False, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SELF_TEST_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the self-test with TensorFlow {tf.__version__} did not end: {error}"
    if done.returncode == 0:
        return None
    return f"the self-test with TensorFlow {tf.__version__} ended with exit code {done.returncode}"
