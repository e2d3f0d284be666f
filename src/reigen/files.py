"""Files that are replaced as a whole, in a directory that others may write to, too.

Data goes to a new file beside the old one, which takes its place by a rename. The new one has an unpredictable name
and is opened only if there is nothing of that name, not even a link (O_EXCL): so nothing that another user has put
there beforehand is opened, followed or shortened, with or without the sticky bit and ``fs.protected_symlinks``. A link
in the file's own place is replaced, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

Buffer = bytes | bytearray | memoryview


@contextlib.contextmanager
def open_replacement(path: str | os.PathLike[str], *, mode: int = 0o666, dir_fd: int | None = None) -> Iterator[int]:
    """Open a new file, which takes the place of another one when the block ends without an error.

    Args:
        path: of the file; it is replaced at once, and may be missing.
        mode: permissions, less the umask.
        dir_fd: the directory that ``path`` is relative to, opened; see `open_directory`.

    Yields:
        The descriptor, which is the caller's to close.

    Raises:
        OSError: it cannot be made or put there, or ``path`` is no file; the old content is still there.
            The error names ``path``.
    """
    target = Path(path)
    try:
        temporary, descriptor = _create_temporary(target, mode, dir_fd)
        try:
            yield descriptor
            os.replace(temporary, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=dir_fd)
            raise
    except OSError as error:
        raise _with_target_name(target, error) from None


def write_atomically(path: str | os.PathLike[str], buffers: Iterable[Buffer], *, mode: int = 0o666) -> None:
    """Write a file so that there is, at any moment and after a power failure, the old one or the new one.

    ``buffers`` are its contents, one after the other; ``mode`` as in `open_replacement`.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    with open_replacement(path, mode=mode) as descriptor, os.fdopen(descriptor, "wb") as file:
        file.writelines(buffers)
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def open_to_append(path: str | os.PathLike[str], *, mode: int = 0o666, dir_fd: int | None = None) -> int:
    """Open a file to append to it: an old one, or a new one. No link is followed.

    Args:
        path: of the file.
        mode: permissions of a new one, less the umask.
        dir_fd: see `open_replacement`.

    Returns:
        The descriptor, which never waits, whatever the file is.

    Raises:
        OSError: it is a link, or cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, mode, dir_fd=dir_fd)


def open_locked(path: str | os.PathLike[str], flags: int, *, mode: int = 0o600) -> int:
    """Open a file or a directory, and lock it (flock) against other processes for as long as it is open.

    Args:
        path: of the file. No link is followed.
        flags: of `os.open`.
        mode: permissions of a new file, less the umask.

    Returns:
        The descriptor.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def privacy_problem(status: os.stat_result, *, is_parent: bool = False) -> str | None:
    """Return what keeps a file, or a directory, from being this user's alone, in words that follow its name.

    Args:
        status: of the file.
        is_parent: it only has to be such that nobody but this user and root can replace what is in it.

    Returns:
        None: it is private.
    """
    user, mode = os.geteuid(), f"mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_uid != user and not (is_parent and status.st_uid == 0):
        return f"belongs to user {status.st_uid}, this process to user {user}"
    if is_parent:
        may_be_changed = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        return f"may be changed by others ({mode})" if may_be_changed else None
    return f"may be used by others ({mode})" if status.st_mode & 0o077 else None


@contextlib.contextmanager
def open_directory(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a directory whose name others can foresee, and may replace at any moment.

    Yields:
        Its descriptor: relative paths are in this directory, whatever has its name by then.

    Raises:
        OSError: it cannot be opened, is a link, or belongs neither to this user nor to root.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and Path(path).is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a link") from None
        raise
    try:
        if (status := os.fstat(descriptor)).st_uid not in {0, os.geteuid()}:
            raise PermissionError(errno.EPERM, f"{path} {privacy_problem(status)}")
        yield descriptor
    finally:
        os.close(descriptor)


def check_can_be_written(path: str | os.PathLike[str]) -> None:
    """Check that `write_atomically` can begin, before the data is collected, if that takes long.

    Raises:
        OSError: the directory is not there or may not be written to, or ``path`` is a directory or a device.
    """
    target = Path(path)
    try:
        temporary, descriptor = _create_temporary(target, 0o600)
        os.close(descriptor)
        temporary.unlink()
    except OSError as error:
        raise _with_target_name(target, error) from None


def _create_temporary(target: Path, mode: int, dir_fd: int | None = None) -> tuple[Path, int]:
    """Create a file in the directory of ``target``, opened."""
    try:
        kind = os.stat(target, dir_fd=dir_fd).st_mode
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            raise
        kind = stat.S_IFREG  # there is none, or a link that leads nowhere
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "Not a regular file")  # a device, a pipe: to be left where it is
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd
    )
    return temporary, descriptor


def _with_target_name(target: Path, error: OSError) -> OSError:
    """Name the user's file in an error of a temporary file."""
    return OSError(error.errno, error.strerror or str(error), os.fspath(target))
