"""What the device backend says of operations that fail, without any ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reigen.backends.device import DeviceArray, DeviceBackend, backend
from reigen.backends.null import NullBackend
from reigen.errors import CollectiveError, PeerLostError
from reigen.types import DTYPES


class Failing:
    """A device, its stream, its events and its group: all of them fail."""

    kind, name, identity = "cuda", "cuda:0", "GPU-0"

    @property
    def side(self) -> Failing:
        return self

    def library(self) -> tuple[str, str]:
        return "a library", "a test"

    def connect(self, *_: Any) -> Failing:
        return self

    def run(self, work: Any) -> None:
        work()

    def record(self) -> Failing:
        return self

    def passed(self) -> bool:
        raise RuntimeError("connection closed")

    def abort(self) -> None:
        raise RuntimeError("there is nothing to abort")


@pytest.fixture
def failing() -> DeviceBackend:
    """A backend with an operation that is pending and has failed."""
    device: Any = Failing()
    new = DeviceBackend(NullBackend(), [0])
    assert new.takes(device, DTYPES["float32"])
    new.launch([DeviceArray(device, (1,), DTYPES["float32"], None)], lambda _: [], 0.0)
    return new


def test_whoever_is_lost_is_named_before_the_librarys_error(failing: DeviceBackend) -> None:
    assert failing.look() is None
    failing.failure = lambda: PeerLostError("rank 1 is lost", ranks=(1,))
    assert isinstance(failing.look(), PeerLostError)
    with pytest.raises(PeerLostError):
        failing.launch([DeviceArray(failing._shared.device, (1,), DTYPES["float32"], None)], lambda _: [], 0.0)


def test_where_nobody_is_lost_the_library_is_heard(failing: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_NAMING_SECONDS", 0.0)
    assert str(failing.look()) == "cuda:0 has failed: connection closed"


class Work:
    """A collective that is complete; who asks for its error is counted."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error, self.num_asked = error, 0

    def is_completed(self) -> bool:
        return True

    def exception(self) -> RuntimeError | None:
        self.num_asked += 1
        return self.error


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL")])
def test_an_error_is_asked_for_when_a_complete_collectives_event_does_not_pass(
    error: RuntimeError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(backend, "_NAMING_SECONDS", 0.0)
    monkeypatch.setattr(backend.time, "monotonic", lambda: clock.now)
    device: Any = Failing()
    device.passed = lambda: False
    works = [Work(), Work(error)]
    new = DeviceBackend(NullBackend(), [0])
    assert new.takes(device, DTYPES["float32"])
    new.launch([DeviceArray(device, (1,), DTYPES["float32"], None)], lambda _: works, 1000.0)
    for clock.now in (100.0, 100.9):
        assert new.look() is None
    assert [work.num_asked for work in works] == [0, 0]
    clock.now = 101.1
    found = new.look()
    assert (None if found is None else str(found)) == (None if error is None else "a collective on cuda:0 failed: NCCL")


def test_after_an_abort_that_failed_too_every_operation_raises_the_first_error(failing: DeviceBackend) -> None:
    failing.abort(CollectiveError("the first"))
    failing.abort(CollectiveError("the second"))
    assert not failing.has_pending
    with pytest.raises(CollectiveError, match="the first"):
        failing.launch([DeviceArray(failing._shared.device, (1,), DTYPES["float32"], None)], lambda _: [], 0.0)
    failing.close()


class ConvertedWork:
    """A work of torch whose exception is one of C++: pybind11 has no way to give it to Python."""

    def __init__(self, is_failed: bool) -> None:
        self.is_failed = is_failed

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        if self.is_failed:
            raise TypeError("Unable to convert function return value to a Python type!")


def test_an_error_that_torch_cannot_convert_is_an_error_of_the_library() -> None:
    process_group = pytest.importorskip("reigen.torch.process_group")
    assert process_group.C10dWork(ConvertedWork(is_failed=False)).exception() is None
    assert "NCCL_DEBUG=WARN" in str(process_group.C10dWork(ConvertedWork(is_failed=True)).exception())
