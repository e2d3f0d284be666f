"""Stand-in machines for tests; where there can be none, the tests are skipped with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab import Hosts, Unavailable

MakeHosts = Callable[..., Hosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    """``make_hosts(n, ...)``: machines that end with the test; arguments are those of :class:`Hosts`."""
    with contextlib.ExitStack() as stack:

        def make(num_hosts: int, **options: Any) -> Hosts:
            try:
                return stack.enter_context(Hosts(num_hosts, **options))
            except Unavailable as error:
                pytest.skip(str(error))

        yield make
