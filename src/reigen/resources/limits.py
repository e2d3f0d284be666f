"""Limits of a process, or of its kernel, behind an error of a system call, and the way to raise them."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

_MIB = 1 << 20
#: Libraries are mapped between the look and the call: so near to the limit it is the limit.
_NEAR_LIMIT = 64
_UNLIMITED = (resource.RLIM_INFINITY, -1)


def explain_limit(error: OSError, num_bytes: int = 0) -> OSError:
    """Return the same error with the limit that was reached, and how it is raised, where that is known."""
    limit = find_limit(error, num_bytes)
    return OSError(error.errno, f"{os.strerror(error.errno or 0)}: {limit}") if limit else error


def file_size_limit_error(num_bytes: int) -> OSError | None:
    """Return the error of a file of so many bytes (memory without a name, too) if RLIMIT_FSIZE does not allow it.

    To be asked before it is made: the kernel answers with a signal, which ends programs that do not ignore it.
    """
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if soft in _UNLIMITED or num_bytes <= soft else OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def find_limit(error: OSError, num_bytes: int = 0) -> str:
    """Describe the limit of `explain_limit`; empty: unknown."""
    match error.errno:
        case errno.EFBIG:
            return _describe_limit("RLIMIT_FSIZE", "a file, which shared memory is, too, may have {} here", "ulimit -f")
        case errno.EMFILE:
            return _describe_limit("RLIMIT_NOFILE", "a process may have {} open files here", "ulimit -n", unit=0)
        case errno.ENFILE:
            return f"the host allows {_read('/proc/sys/fs/file-max')} open files: sysctl fs.file-max"
        case errno.ENOMEM:
            return _explain_mmap_failure(num_bytes)
        case errno.ENOSPC if _read("/proc/sys/vm/overcommit_memory") == "2":
            return _explain_overcommit()
    return ""


def _explain_mmap_failure(num_bytes: int) -> str:
    """Explain why the kernel has mapped nothing."""
    most = int(_read("/proc/sys/vm/max_map_count") or 0)
    with suppress(OSError):
        if most and Path("/proc/self/maps").read_bytes().count(b"\n") > most - _NEAR_LIMIT:
            return f"a process may have {most} mappings: sysctl vm.max_map_count raises that"
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    with suppress(OSError, ValueError, IndexError):
        in_use = int(_read("/proc/self/statm").split()[0]) * resource.getpagesize()
        if soft not in _UNLIMITED and in_use + num_bytes > soft:
            return _describe_limit("RLIMIT_AS", "the addresses of a process may span {} here", "ulimit -v")
    return _explain_overcommit() if _read("/proc/sys/vm/overcommit_memory") == "2" else ""


def _explain_overcommit() -> str:
    return "the host promises no more memory than it has (vm.overcommit_memory=2): sysctl vm.overcommit_ratio"


def _describe_limit(name: str, text: str, remedy: str, unit: int = _MIB) -> str:
    """Describe a limit of this process; empty where it has none."""
    soft, hard = resource.getrlimit(getattr(resource, name))
    if soft in _UNLIMITED:
        return ""
    value, most = (f"{limit / unit:.4g} MiB" if unit else f"{limit}" for limit in (soft, hard))
    if hard in _UNLIMITED:
        remedy_text = f"`{remedy} unlimited` takes the limit away"
    elif soft != hard:
        remedy_text = f"`{remedy}` raises it, to {most} at most"
    else:
        remedy_text = f"only root can raise what `{remedy}` shows"
    return f"{text.format(value)} ({name}): {remedy_text}"


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""
