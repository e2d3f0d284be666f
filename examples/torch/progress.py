"""A line every two seconds, on one rank: samples per second, the loss, and the time that is left."""

from __future__ import annotations

import time
from typing import SupportsFloat


class Progress:
    """Progress of a training on all ranks together.

    Args:
        num_samples: how many there are in all epochs.
        is_shown: whether this rank prints.
        seconds: between two lines.
    """

    def __init__(self, num_samples: int, *, is_shown: bool, seconds: float = 2.0) -> None:
        self._num_samples, self._is_shown, self._seconds = num_samples, is_shown, seconds
        self._start = self._printed = time.perf_counter()
        self._seen = 0

    def add(self, samples: int, loss: SupportsFloat) -> None:
        """Count the samples of a step, and print their loss where it is time, and in the end."""
        self._seen += samples
        now = time.perf_counter()
        if self._is_shown and (now - self._printed >= self._seconds or self._seen >= self._num_samples):
            self._printed = now
            done = self._seen / self._num_samples
            print(f"{done:4.0%}  {self.rate:8,.1f} samples/s  loss {float(loss):.4f}  {self.eta}", flush=True)

    @property
    def rate(self) -> float:
        """Samples per second since the beginning."""
        return self._seen / (time.perf_counter() - self._start)

    @property
    def eta(self) -> str:
        """The time that is left, if all goes on as it did: "ETA 1:05"."""
        minutes, seconds = divmod(round(max(0, self._num_samples - self._seen) / self.rate), 60)
        return f"ETA {minutes}:{seconds:02}"

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start
