"""Keys and values by which process groups find each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from reigen.errors import CollectiveError


class StoreWrite(msgspec.Struct, frozen=True, array_like=True):
    """Change of the store: ``value`` is the key's from now on or, if it is a number, is added to it."""

    key: str
    value: bytes | int


class ReplicatedStore:
    """Keys and values that the ranks of a group share while they connect; the rules of ``torch.distributed.Store``.

    Each rank has a copy, and all carry out changes in the same order. Waiting ends with a `CollectiveError` where the
    attempt to connect has failed on another rank.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._unsent: list[StoreWrite] = []
        #: of this rank's additions that were carried out, the sums
        self._sums: list[int] = []
        self._num_additions = 0
        self._cancelled = ""

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        with self._changed:
            self._unsent.append(StoreWrite(key, value))
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has one."""
        with self._changed:
            self._wait_until(lambda: key in self._values)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        with self._changed:
            self._unsent.append(StoreWrite(key, amount))
            number = self._num_additions
            self._num_additions += 1
            self._changed.notify_all()
            self._wait_until(lambda: len(self._sums) > number)
            return self._sums[number]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with self._changed:
            return all(key in self._values for key in keys)

    def cancel(self, reason: str) -> None:
        """End all waiting here, now and later."""
        with self._changed:
            self._cancelled = reason
            self._changed.notify_all()

    def collect(self, timeout_seconds: float) -> list[StoreWrite]:
        """Return this rank's writes since the last call, after a moment if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent, timeout_seconds)
            unsent, self._unsent = self._unsent, []
            return unsent

    def apply(self, writes: Sequence[StoreWrite], *, own: bool) -> None:
        """Carry out a rank's writes; ``own``: this one's."""
        with self._changed:
            for write in writes:
                value = write.value
                if isinstance(value, int):
                    total = int(self._values.get(write.key, b"0")) + value
                    if own:
                        self._sums.append(total)
                    value = str(total).encode()
                self._values[write.key] = value
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._cancelled or condition())
        if not condition():
            raise CollectiveError(self._cancelled)
