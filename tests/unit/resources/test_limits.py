"""Limits of a process: each error names the one that was reached, and what raises it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reigen.resources import limits
from reigen.resources.limits import explain_limit, find_limit


def under(name: str, soft: int, code: str) -> str:
    """What Python code prints in a process with a limit of its own, which imports before that."""
    program = (
        "import os, resource, signal\nimport numpy\nfrom reigen.errors import SharedMemoryError\n"
        "from reigen.net.shm_segment import ShmSegment\nfrom reigen.runner import serialization\nsegment = "
        "ShmSegment.create('test')\n"
        f"resource.setrlimit(resource.{name}, ({soft}, resource.getrlimit(resource.{name})[1]))\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("action", ["signal.SIG_DFL", "signal.SIG_IGN"])
def test_shared_memory_larger_than_a_file_may_be(action: str) -> None:
    code = f"""
signal.signal(signal.SIGXFSZ, {action})
segment.grow(1 << 19, "staging")
try:
    segment.grow(1 << 20, "buckets")
except SharedMemoryError as error:
    print(error, error.needed_bytes, error.available_bytes, segment.size == 1 << 19)
"""
    told = under("RLIMIT_FSIZE", 1 << 20, code)
    assert told == (
        "no shared memory for buckets (1.0 MiB): File too large: a file, which shared memory is, too, may have 1 MiB "
        "here (RLIMIT_FSIZE): `ulimit -f unlimited` takes the limit away 1048576 None True"
    )


def test_a_parcel_larger_than_a_file_may_be() -> None:
    code = """
try:
    serialization.pack_object(numpy.zeros(1 << 21, numpy.uint8), "the function")
except SharedMemoryError as error:
    print(error)
"""
    told = under("RLIMIT_FSIZE", 1 << 20, code)
    assert told.startswith("no shared memory for the function (2.0 MiB): File too large: a file, which")
    assert "`ulimit -f unlimited`" in told


def test_too_many_open_files() -> None:
    code = """
held = []
try:
    while True:
        held.append(ShmSegment.create("more"))
except OSError as error:
    print(error.errno, error)
"""
    told = under("RLIMIT_NOFILE", 50, code)
    assert told.startswith(f"{errno.EMFILE} [Errno {errno.EMFILE}] Too many open files: a process may have 50 open ")
    assert "files here (RLIMIT_NOFILE): `ulimit -n` raises it, to" in told


def test_no_addresses_left() -> None:
    code = """
segment.grow(64 << 20, "buckets")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
try:
    segment.map(0, 64 << 20)
except OSError as error:
    print(error)
"""
    told = under("RLIMIT_AS", -1, code)
    assert "cannot map 67108864 bytes of shared memory: Cannot allocate memory: the addresses of a process" in told
    assert "(RLIMIT_AS): `ulimit -v unlimited` takes the limit away" in told


def test_what_only_the_machine_can_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/sys/vm/max_map_count": "3", "/proc/sys/vm/overcommit_memory": "0", "/proc/sys/fs/file-max": "9"}
    monkeypatch.setattr(limits, "_read", lambda path: files.get(path, ""))
    assert "3 mappings: sysctl vm.max_map_count" in find_limit(OSError(errno.ENOMEM, ""))
    assert find_limit(OSError(errno.ENFILE, "")) == "the host allows 9 open files: sysctl fs.file-max"
    files |= {"/proc/sys/vm/max_map_count": "1000000000", "/proc/sys/vm/overcommit_memory": "2"}
    assert "vm.overcommit_memory=2" in find_limit(OSError(errno.ENOMEM, ""))
    assert "vm.overcommit_memory=2" in find_limit(OSError(errno.ENOSPC, ""))


def test_what_nobody_knows_stays_as_it_is() -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert explain_limit(error) is error
    assert find_limit(OSError(errno.ENOSPC, "")) == "" or Path("/proc/sys/vm/overcommit_memory").read_text()[0] == "2"


@pytest.mark.parametrize(
    ("soft", "hard", "told"),
    [
        (1 << 20, 2 << 20, "may have 1 MiB here (RLIMIT_FSIZE): `ulimit -f` raises it, to 2 MiB at most"),
        (1 << 20, 1 << 20, "may have 1 MiB here (RLIMIT_FSIZE): only root can raise what `ulimit -f` shows"),
        (-1, -1, ""),
    ],
)
def test_how_far_a_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, told: str) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (soft, hard))
    assert find_limit(OSError(errno.EFBIG, "")).endswith(told)
