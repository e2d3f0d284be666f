"""Secret of a job's nodes in a directory that all of them share, for engines that give none: node 0 makes it."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from reigen.errors import ConfigError, LaunchError
from reigen.files import write_atomically
from reigen.launch.nodes.sources import NodeJob
from reigen.launch.options import complain
from reigen.net.auth import SECRET_BYTES

_PAUSE_SECONDS, _NOTICE_SECONDS = 0.1, 30.0


def ensure_secret_file(job: NodeJob, seconds: float) -> None:
    """Write the file on node 0, which is this user's alone; wait for it on the others.

    Raises:
        ConfigError: it cannot be written.
        LaunchError: it has not come within ``seconds``.
    """
    if job.index == 0:
        try:
            write_atomically(job.secret_file, [secrets.token_bytes(SECRET_BYTES).hex().encode()], mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"{job.source}: node 0 cannot write {job.secret_file} ({error.strerror}), by which the nodes know each "
                "other: begin in a directory that all of them share, or set REIGEN_SECRET_FILE"
            ) from None
        return
    begin = time.monotonic()
    next_notice = begin + _NOTICE_SECONDS
    path = Path(job.secret_file)
    while not _is_there(path):
        now = time.monotonic()
        if now - begin > seconds:
            raise LaunchError(
                f"node 0 ({job.leader}) has not written {path} within {seconds:g} s: is {path.parent} shared by the "
                "nodes? If not, set REIGEN_SECRET_FILE on all of them"
            )
        if now >= next_notice:
            next_notice += _NOTICE_SECONDS
            complain(f"waiting for {path}, which node 0 ({job.leader}) writes, since {now - begin:.0f} s")
        time.sleep(_PAUSE_SECONDS)


def remove_secret_file(job: NodeJob) -> None:
    """Remove the file: the nodes know each other. Where it cannot be, it is worth nothing any more."""
    with suppress(OSError):
        Path(job.secret_file).unlink()


def _is_there(path: Path) -> bool:
    # listing a directory has its server asked, where a name that was missing may be remembered as missing
    with suppress(OSError), os.scandir(path.parent) as entries:
        return any(entry.name == path.name for entry in entries)
    return False
