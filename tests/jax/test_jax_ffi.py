"""Runtimes with another foreign function interface than the known ones are refused before anything is called."""

from __future__ import annotations

import ctypes

import pytest

from reigen.errors import ArgumentError, MismatchError, PeerLostError
from reigen.xla import FfiMismatchError, RuntimeFailures, register_handler
from reigen.xla.failures import status_code
from reigen.xla.ffi_structs import FfiApi, FfiBuffer, FfiCallFrame, FfiVersion


def make_api(*, size: int = ctypes.sizeof(FfiApi), version: tuple[int, int] = (0, 3)) -> FfiApi:
    return FfiApi(struct_size=size, version=FfiVersion(ctypes.sizeof(FfiVersion), None, *version))


@pytest.mark.parametrize("api", [make_api(version=(1, 0)), make_api(version=(0, 9)), make_api(size=64)])
def test_another_interface_is_refused(api: FfiApi) -> None:
    with pytest.raises(FfiMismatchError, match=r"known are the versions 0\.4"):
        register_handler(ctypes.addressof(api), "never")


def test_a_runtime_without_the_interface_is_refused() -> None:
    with pytest.raises(FfiMismatchError, match="no foreign function interface"):
        register_handler(0, "never")


def test_sizes_are_those_of_the_header() -> None:
    # xla/ffi/api/c_api.h, version 0.3, on 64 bits
    assert ctypes.sizeof(FfiBuffer) == 48
    assert FfiCallFrame.future.offset == 8 * 5 + 40 + 40 + 48
    assert FfiApi.future_set_error.offset == 48 + 8 * 15


def test_errors_are_found_again_by_their_texts() -> None:
    failures = RuntimeFailures()
    lost = PeerLostError("rank 1 died", tensor="a", ranks=[1])
    texts = [failures.text_of(error) for error in (lost, ArgumentError("wrong"), KeyError("other"))]
    found = failures.find(f"UNKNOWN: {texts[0]} and more")
    assert isinstance(found, PeerLostError)
    assert found.ranks == (1,)
    assert isinstance(failures.find(texts[1]), ArgumentError)
    assert failures.find(texts[2]) is None
    assert [status_code(error) for error in (MismatchError("m"), ArgumentError("a"), lost, KeyError())] == [9, 3, 2, 13]
