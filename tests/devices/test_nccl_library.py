"""libnccl itself, where there is one; and what is said where there is none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.devices.nccl import Fabric, FakeNccl

from reigen.errors import CollectiveError
from reigen.planes import nccl_library
from reigen.planes.nccl_library import Communicator, Nccl


@pytest.fixture
def fresh() -> Iterator[None]:
    nccl_library.load.cache_clear()
    yield
    nccl_library.load.cache_clear()


def test_declarations_fit_the_library_that_is_here() -> None:
    nccl, source = nccl_library.load()
    if nccl is None:
        pytest.skip(source)
    assert nccl.version >= 21400
    assert nccl.text(4, None).startswith("invalid argument")
    assert nccl.text(7, None).startswith("NCCL operation in progress")
    # NCCL listens for the ranks that have the id until its process ends: so another process asks for one.
    program = "from reigen.planes import nccl_library; print(nccl_library.load()[0].unique_id().hex())"
    child = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    unique = bytes.fromhex(child.stdout.strip().splitlines()[-1])
    assert len(unique) == 128
    assert any(unique)


def test_no_library(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_SONAME", "libnothing.so.2")
    nccl, reason = nccl_library.load()
    assert nccl is None
    assert reason.startswith("there is no NCCL: libnothing.so.2")


def test_a_library_that_is_something_else(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_library, "_candidates", lambda: iter([(None, os.RTLD_NOW)]))  # the process itself
    nccl, reason = nccl_library.load()
    assert nccl is None
    assert "ncclGetVersion" in reason


def test_a_library_that_is_too_old(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    old = FakeNccl(Fabric(), version=21003)
    monkeypatch.setattr(nccl_library, "declare", lambda _: old)
    monkeypatch.setattr(nccl_library, "_candidates", lambda: iter([(None, os.RTLD_NOW)]))
    nccl, reason = nccl_library.load()
    assert nccl is None
    assert "is NCCL 2.10.3, and 2.14 is the first" in reason


def test_failures_say_what_failed_and_why() -> None:
    fake = FakeNccl(Fabric())
    fake.broken["ncclGetUniqueId"] = 6
    with pytest.raises(
        CollectiveError, match=r"NCCL 2\.27\.3: ncclGetUniqueId failed: remote .* \(said the stand-in\)"
    ):
        Nccl(fake, "a stand-in").unique_id()


def test_the_configuration_is_that_of_nccl_2_14() -> None:
    """size_t, two unsigned, an int, and what aligns it: as a C compiler lays it out on a 64-bit machine."""
    assert ctypes.sizeof(nccl_library.Config) == 24
    assert nccl_library.Config.blocking.offset == 16
    assert ctypes.sizeof(nccl_library.UniqueId) == 128
    assert Communicator().handle is None
