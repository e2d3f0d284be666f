"""Driver script in a container of SageMaker's: makes the environment's job a command of `reigen run`.

The SDK copies this file, alone, beside its own drivers. It gives the entry script's name, the hyperparameters and the
configuration in variables.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path


def make_command(environ: Mapping[str, str], python: str) -> list[str]:
    """Make the command of the job; raises ValueError where the entry script is of an unknown kind."""
    config = json.loads(environ.get("SM_DISTRIBUTED_CONFIG") or "{}")
    script = environ["SM_ENTRY_SCRIPT"]
    if script.endswith(".py"):
        command = [python, script]
    elif script.endswith(".sh"):
        command = ["/bin/sh", script]
    else:
        raise ValueError(f"entry script {script}: only .py and .sh can be run")
    for name, value in json.loads(environ.get("SM_HPS") or "{}").items():
        command += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    count = config.get("process_count_per_node")
    num_ranks = "auto" if not count else str(int(count) * int(environ.get("SM_HOST_COUNT") or 1))
    run = [python, "-P", "-m", "reigen", "run", "--nodes-from-env", "-np", num_ranks]
    return [*run, *(config.get("options") or []), *command]


def copy_secret(source: Path) -> str:
    """Copy the secret to a file that only this user may read: in an input channel others may."""
    directory = Path(tempfile.mkdtemp(prefix="reigen-"))
    target = directory / "secret"
    shutil.copyfile(source, target)
    target.chmod(stat.S_IRUSR)
    return str(target)


def main() -> None:
    """Become the command."""
    secret = Path(__file__).with_name("secret")
    environ = {**os.environ, "REIGEN_SECRET_FILE": copy_secret(secret)}
    command = make_command(environ, sys.executable)
    print("reigen driver:", " ".join(command), flush=True)  # noqa: T201
    os.execvpe(command[0], command, environ)


if __name__ == "__main__":
    main()
