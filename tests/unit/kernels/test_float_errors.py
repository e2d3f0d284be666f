"""Blocks without NumPy's floating-point warnings, one in another, and what is as before behind them."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

from reigen.kernels.float_errors import ignore_float_errors


def warns() -> bool:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        np.divide(np.ones(1, np.float32), np.zeros(1, np.float32))
    return bool(told)


def test_the_outermost_block_counts() -> None:
    before = np.geterr()
    assert warns()
    with ignore_float_errors():
        assert not warns()
        with ignore_float_errors():
            assert not warns()
        assert not warns()
    assert warns()
    assert np.geterr() == before


def test_an_exception_ends_it_too() -> None:
    with pytest.raises(ValueError, match="inside"), ignore_float_errors(), ignore_float_errors():
        raise ValueError("inside")
    assert warns()
    with ignore_float_errors():
        assert not warns()


def test_other_threads_have_their_own() -> None:
    told: list[bool] = []
    with ignore_float_errors():
        thread = threading.Thread(target=lambda: told.append(warns()))
        thread.start()
        thread.join()
    assert told == [True]
