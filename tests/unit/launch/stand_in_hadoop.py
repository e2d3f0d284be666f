"""Stand-in for the gateway to Hadoop's client, where no Java is: what a test does not name does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from reigen.errors import LaunchError


class Java:
    """Anything of Java's that matters to no test: all its members and results are itself."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: object) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def returns(value: object) -> Any:
    return lambda *arguments: value


class Hadoop:
    """Gateway to a client of Hadoop's.

    Args:
        members: of its packages, whichever they are in.
    """

    def __init__(self, **members: Any) -> None:
        self.jvm = Java()
        vars(self.jvm).update(members)
        self.strings = list
        self.has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LaunchError(f"{what}: {error}") from None
