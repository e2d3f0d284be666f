"""LeakCheck names what is left behind, waits for what is closing, and lets pass what is kept on purpose."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from reigen.testing import LeakCheck, LeakError, Resources


def check_now() -> LeakCheck:
    return LeakCheck(deadline_seconds=0.0)


def test_nothing_left() -> None:
    with check_now(), Path("/dev/null").open():
        pass


def test_a_descriptor_is_named_with_what_it_points_at() -> None:
    descriptor = -1
    try:
        with pytest.raises(LeakError, match=r"descriptor \d+ -> /dev/null"), check_now():
            descriptor = os.open("/dev/null", os.O_RDONLY)
    finally:
        os.close(descriptor)


def test_a_descriptor_kept_on_purpose() -> None:
    with LeakCheck(deadline_seconds=0.0, keep=lambda: Resources(descriptors=frozenset({descriptor}))):
        descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)


def test_a_thread_is_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(LeakError, match="thread 'forgotten'"), check_now():
        thread.start()
    stop.set()
    thread.join()


def test_a_thread_that_is_ending_gets_time() -> None:
    about_to_end = threading.Event()
    with LeakCheck():
        threading.Thread(target=about_to_end.wait).start()
        about_to_end.set()


def test_a_child_process_and_its_zombie() -> None:
    check = check_now()
    with pytest.raises(LeakError, match="child process"), check:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert any("zombie" in leak for leak in check.leaks())
    child.wait()
    assert not any("child" in leak for leak in check.leaks())


def test_shared_memory_that_is_still_mapped() -> None:
    def map_some() -> mmap.mmap:
        descriptor = os.memfd_create("left-mapped")
        os.ftruncate(descriptor, 4096)
        mapping = mmap.mmap(descriptor, 4096)
        os.close(descriptor)
        return mapping

    with pytest.raises(LeakError, match="/memfd:left-mapped"), check_now():
        mapping = map_some()
    mapping.close()


def test_a_file_in_dev_shm() -> None:
    path = Path("/dev/shm") / f"left-{uuid.uuid4().hex}"
    try:
        with pytest.raises(LeakError, match=path.name), check_now():
            path.write_bytes(b"x")
    finally:
        path.unlink()


def test_an_error_inside_matters_more() -> None:
    def leave_and_fail() -> None:
        descriptors.append(os.open("/dev/null", os.O_RDONLY))
        raise ZeroDivisionError

    descriptors: list[int] = []
    with pytest.raises(ZeroDivisionError), check_now():
        leave_and_fail()
    os.close(*descriptors)
