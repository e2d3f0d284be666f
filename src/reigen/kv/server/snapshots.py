"""Snapshots of a server on disk, so that another process can take its place: a file for each shard, one for each store.

``DIRECTORY/job-SECRET-JOB/server-NUMBER/``, where SECRET is a hash of the job's secret and JOB its number: no job reads
the snapshots of another, or changes them. A server restores what it finds under its own job and number: that is its
predecessor's, whether anybody remembers that or not. Only the end of the job removes anything, when all workers have
left in good order.

Files are those of `reigen.optim.array_files` and are replaced as a whole: there is always the last one that was
complete. Shards are saved at different times: each is as it was after some round, which its file says. Directories are
of mode 0700 and belong to the server's user. A process holds its directory locked (flock): while it lives, even if it
is stopped, no other one saves there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
from numpy.typing import NDArray

from reigen.cluster.membership.messages import MAX_SAVED_JOBS, SavedJob
from reigen.errors import ConfigError, ReigenError, WireError
from reigen.files import Buffer, open_locked, privacy_problem, write_atomically
from reigen.kv.consistency.sample_leases import LedgerState
from reigen.kv.protocol import KeySpec, ShardRange
from reigen.kv.server.shard import ShardId, ShardSnapshot
from reigen.optim import packed, unpacked

_log = logging.getLogger(__name__)
_SHARD_FILE = re.compile(r"store-(\d+)-([0-9a-f]{16})-(\d+)\.shard")
_STORE_FILE = re.compile(r"store-(\d+)\.store")
#: A file that was being written when its process was killed.
_TEMPORARY_FILE = re.compile(r"\.store-.*\.tmp")


class StoreSnapshot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Facts of a store's snapshot beside its shards.

    Attributes:
        staleness: None is infinite.
        settings: of `reigen.kv.server.store_settings.StoreSettings.state`.
        keys: that have their home here: id, spec, places.
        left: workers that have left.
        missed: workers that were lost, and the others go on without.
        incarnations: of all workers' processes that have been here.
        excluded: incarnations of processes of an elastic job that may not go on.
        ledgers: of leases of samples.
    """

    staleness: int | None
    settings: dict[str, Any]
    keys: list[tuple[int, KeySpec, tuple[ShardRange, ...]]]
    left: tuple[int, ...]
    missed: tuple[int, ...]
    incarnations: dict[int, int]
    excluded: tuple[int, ...] = ()
    ledgers: tuple[LedgerState, ...] = ()


LoadedShard = tuple[ShardSnapshot, dict[str, NDArray[Any]]]


class SnapshotStorage(Protocol):
    """Storage of a server's snapshots: `SnapshotDirectory`, or `reigen.kv.server.replicas.ServerCopies`.

    Attributes:
        is_remote: saving waits for another process.
    """

    is_remote: bool

    def save_store(self, store: int, facts: StoreSnapshot) -> None:
        """Replace the facts of a store; raises OSError if they cannot be kept."""

    def save_shard(self, store: int, shard: ShardId, contents: list[Buffer]) -> None:
        """Replace a shard; raises OSError if it cannot be kept."""

    def forget_shard(self, store: int, shard: ShardId) -> None:
        """Remove a shard."""

    def is_stale(self, store: int, shard: ShardId | None) -> bool:
        """Return whether a shard, or the facts of a store, are to be saved once more, though they were."""

    def load(self) -> Iterator[tuple[int, StoreSnapshot, Iterator[LoadedShard]]]:
        """Yield each store: number, facts, and shards with their arrays; WireError names damage."""


class SnapshotDirectory:
    """Files of one server. Different shards may be saved by different threads.

    Args:
        directory: of all jobs (REIGEN_KV_SNAPSHOT_DIR).
        secret, job: the job's secret and number.
        number: the server's.

    Raises:
        ConfigError: the directory cannot be made, is not as private as it must be, or another process saves there.
    """

    is_remote = False

    def __init__(self, directory: str, secret: bytes, job: int, number: int) -> None:
        self.directory = Path(directory) / f"{_directory_prefix(secret)}{job:016x}" / f"server-{number}"
        try:
            for path in (*reversed(self.directory.parents), self.directory):
                if not path.exists():
                    with contextlib.suppress(FileExistsError):  # another server has made it, or it is a link to nothing
                        path.mkdir(mode=0o700)
            if problem := privacy_problem(Path(directory).stat(), is_parent=True):
                raise ConfigError(
                    f"snapshots cannot be kept in {directory}: it {problem}. Set REIGEN_KV_SNAPSHOT_DIR to a directory "
                    "of your own, for example one in it, which is made if it is not there"
                )
            _check_private(self.directory.parent)
            _check_private(self.directory)
            self._lock = _lock_directory(self.directory)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be kept in {directory}: {error.strerror}") from None

    def close(self) -> None:
        """Let another process save there. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove all of them and the directory; the job's, too, if this was its last server here.

        Raises:
            OSError: they cannot be removed, or somebody has done so.
        """
        for path in self.directory.iterdir():
            if any(kind.fullmatch(path.name) for kind in (_SHARD_FILE, _STORE_FILE, _TEMPORARY_FILE)):
                path.unlink()
        self.remove_if_empty()

    def remove_if_empty(self) -> bool:
        """Remove the directory, and the job's, if nothing was kept there; return whether this server's is gone."""
        with contextlib.suppress(OSError):  # the user has put something there, or other servers are not through yet
            self.directory.rmdir()
            self.directory.parent.rmdir()
        return not self.directory.exists()

    def save_store(self, store: int, facts: StoreSnapshot) -> None:
        """Replace the facts of a store; raises OSError if they cannot be written."""
        write_atomically(self.directory / f"store-{store}.store", packed(facts, {}), mode=0o600)

    def save_shard(self, store: int, shard: ShardId, contents: list[Buffer]) -> None:
        """Replace the file of a shard; raises OSError if it cannot be written."""
        write_atomically(self._shard(store, shard), contents, mode=0o600)

    def forget_shard(self, store: int, shard: ShardId) -> None:
        """Remove the file of a shard."""
        with contextlib.suppress(FileNotFoundError):
            self._shard(store, shard).unlink()

    def is_stale(self, store: int, shard: ShardId | None) -> bool:
        """Return False: files stay."""
        return False

    def load(self) -> Iterator[tuple[int, StoreSnapshot, Iterator[LoadedShard]]]:
        """Yield each saved store: number, facts, and shards with their arrays; WireError names a damaged file."""
        names = sorted(path.name for path in self.directory.iterdir())
        shards = [match for name in names if (match := _SHARD_FILE.fullmatch(name))]
        for name in names:
            if match := _STORE_FILE.fullmatch(name):
                own = [self.directory / each[0] for each in shards if int(each[1]) == int(match[1])]
                loaded = (_read(path, ShardSnapshot) for path in own)
                yield int(match[1]), _read(self.directory / name, StoreSnapshot)[0], loaded

    def _shard(self, store: int, shard: ShardId) -> Path:
        return self.directory / f"store-{store}-{shard[0]:016x}-{shard[1]}.shard"


def _read(path: Path, facts: Any) -> tuple[Any, dict[str, NDArray[Any]]]:
    try:
        return unpacked(path.read_bytes(), facts)
    except ConfigError as error:
        raise WireError(f"{path}: {error}") from None


def find_saved_jobs(directory: str, secret: bytes) -> tuple[SavedJob, ...]:
    """Find the jobs with this secret of which servers of this host have saved something, the latest first.

    There are at most `MAX_SAVED_JOBS`. What cannot be read is left out: its server will say so.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in Path(directory).glob(f"{_directory_prefix(secret)}*"):
            with contextlib.suppress(OSError, ReigenError, ValueError):
                _check_private(path)  # what others have put there is not opened
                for each in path.glob("server-*"):
                    _check_private(each)
                stores = [each for each in path.glob("server-*/store-*.store") if _STORE_FILE.fullmatch(each.name)]
                left = {worker for each in stores for worker in _read(each, StoreSnapshot)[0].left}
                saved = SavedJob(int(path.name.removeprefix(_directory_prefix(secret)), 16), tuple(sorted(left)))
                found.append((max(each.stat().st_mtime_ns for each in stores), saved))
    return tuple(saved for _, saved in sorted(found, key=lambda one: one[0], reverse=True)[:MAX_SAVED_JOBS])


def _directory_prefix(secret: bytes) -> str:
    return f"job-{hashlib.blake2b(b'snapshots of a parameter server' + bytes(1) + secret, digest_size=8).hexdigest()}-"


def _check_private(path: Path) -> None:
    status = path.lstat()
    problem = privacy_problem(status) if stat.S_ISDIR(status.st_mode) else "is no directory"
    if problem:
        should_be = ", and should be of mode 0700" if problem.startswith("may") else ""
        raise ConfigError(f"snapshots cannot be kept in {path}: it {problem}{should_be}")


def _lock_directory(path: Path) -> int:
    """Return the directory, opened and locked for as long as it is open; -1 on a file system without locks."""
    try:
        return open_locked(path, os.O_RDONLY | os.O_DIRECTORY)
    except BlockingIOError:
        raise ConfigError(
            f"another process still saves the snapshots in {path}, and is perhaps stopped: end it before its place is "
            "taken"
        ) from None
    except OSError as error:
        if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        _log.info("%s cannot be locked: %s", path, error.strerror)
    return -1
