"""Self-tests of native operations with a runtime of a version that is not known, and their verdicts, which are kept.

Native operations rely on layouts and orders of a runtime, and one that has others may end the process. So a self-test
runs in a process of its own, the first time that such a version is seen; its verdict is kept in the user's directory
for caches, for this build of the runtime.
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
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from reigen._version import __version__
from reigen.files import write_atomically

#: Of what a self-test wrote to stderr.
_MAX_REASON_CHARS = 300
_SELF_TEST_SECONDS = 120.0
_OK = "ok"
_TESTED_ARCHITECTURES = ("x86_64",)


@dataclass(frozen=True)
class SelfTest:
    """The self-test of one kind of native operations with one build of a runtime.

    Attributes:
        runtime: its name.
        version: the runtime's.
        library: file of the runtime, which another build replaces.
        module: is run as a program, and ends with exit code 0 if the operations work.
        tested_versions: versions that need no self-test, since the project's tests have run with them.
        environment: more variables of the program.
    """

    runtime: str
    version: str
    library: Path
    module: str
    tested_versions: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def is_tested(self) -> bool:
        """Return whether it is known, without running it, that it would succeed."""
        known = self.version in self.tested_versions and platform.machine() in _TESTED_ARCHITECTURES
        return known and sys.platform == "linux"

    @property
    def verdict_path(self) -> Path:
        """File for the verdict on this build, with these operations, in this interpreter."""
        with suppress(OSError):
            status = self.library.stat()
            facts = [str(self.library), status.st_size, status.st_mtime_ns, self.version, __version__]
            facts += [sysconfig.get_config_var("SOABI"), platform.libc_ver()]
            digest = blake2b(repr(facts).encode(), digest_size=12).hexdigest()
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            return Path(cache) / "reigen" / f"{self.module}-{digest}.json"
        return Path(os.devnull)

    def judge(self) -> str | None:
        """Return why the operations cannot be used; None: they can."""
        return None if self.is_tested else _remembered_verdict(self)

    def run(self) -> str | None:
        """Run it in a process of its own; returns the failure, or None.

        Raises:
            OSError, subprocess.TimeoutExpired: it did not come to its end, which says little about the runtime.
        """
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("REIGEN_", "HOROVOD_"))}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-m", self.module],
            check=False,
            env=environ | dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SELF_TEST_SECONDS,
        )
        if done.returncode == 0:
            return None
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        failure = f"the self-test with {self.runtime} {self.version} ended with exit code {done.returncode}"
        return f"{failure}: {reason[:_MAX_REASON_CHARS]}" if reason else failure


@functools.cache
def _remembered_verdict(test: SelfTest) -> str | None:
    """Return the verdict of a self-test: the kept one, if there is one."""
    path = test.verdict_path
    with suppress(OSError, ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, str):
            return None if kept == _OK else kept
    try:
        verdict = test.run()
    except (OSError, subprocess.TimeoutExpired) as error:  # such as a machine that is busy: tested again next time
        return f"the self-test with {test.runtime} {test.version} did not end: {error}"
    with suppress(OSError):  # then it is tested again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, [json.dumps(verdict or _OK).encode()], mode=0o600)
    return verdict
