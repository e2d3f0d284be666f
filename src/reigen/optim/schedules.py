"""Learning-rate schedules: a rate for each number of updates.

A schedule is a function without memory: servers may ask for any update at any time, and workers that are at different
updates get different rates. Updates count from 1. The names and numbers are MXNet's (`mx.lr_scheduler`).

All begin with an optional warm-up: while ``num_update < warmup_steps`` the rate grows from ``warmup_begin_lr`` to
``base_lr`` in equal steps (``warmup_mode="linear"``) or stays at ``warmup_begin_lr`` ("constant").
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from reigen.errors import ConfigError
from reigen.optim.checks import check_fields


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Base of the schedules.

    Attributes:
        base_lr: the rate at the end of the warm-up. An optimizer's ``learning_rate``, where given, replaces it.
        warmup_steps: number of updates in the warm-up.
        warmup_begin_lr: the rate where it begins; at most ``base_lr``.
        warmup_mode: "linear" or "constant".

    Raises:
        ConfigError: a value makes no sense.
    """

    name: ClassVar[str]
    base_lr: float = 0.01
    warmup_steps: int = field(default=0, metadata={"least": 0})
    warmup_begin_lr: float = field(default=0.0, metadata={"least": 0.0})
    warmup_mode: str = "linear"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_steps and self.warmup_begin_lr > self.base_lr:
            raise ConfigError(
                f"warmup_begin_lr={self.warmup_begin_lr} is above the rate that the warm-up leads to, {self.base_lr}"
            )
        if self.warmup_mode not in {"linear", "constant"}:
            raise ConfigError(f"warmup_mode={self.warmup_mode!r} is neither 'linear' nor 'constant'")

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of update ``num_update``, counted from 1."""
        if num_update >= self.warmup_steps:
            return self._after_warmup(num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    @abstractmethod
    def _after_warmup(self, num_update: int) -> float:
        """Return the rate of an update that is not in the warm-up."""


@dataclass(frozen=True, kw_only=True)
class FactorScheduler(Schedule):
    """Schedule that multiplies the rate with ``factor`` after every ``step`` updates, down to ``stop_factor_lr``."""

    name: ClassVar[str] = "factor"
    step: int = field(metadata={"least": 1})
    factor: float = field(default=1.0, metadata={"least": 0.0, "most": 1.0})
    stop_factor_lr: float = field(default=1e-8, metadata={"least": 0.0})

    def _after_warmup(self, num_update: int) -> float:
        times = max(num_update - 1, 0) // self.step
        rate = self.base_lr * self.factor**times
        return max(rate, self.stop_factor_lr) if times else rate


@dataclass(frozen=True, kw_only=True)
class MultiFactorScheduler(Schedule):
    """Schedule that multiplies the rate with ``factor`` after each of the updates in ``step``, an increasing list."""

    name: ClassVar[str] = "multifactor"
    step: Sequence[int]
    factor: float = field(default=1.0, metadata={"least": 0.0, "most": 1.0})

    def __post_init__(self) -> None:
        super().__post_init__()
        step = tuple(self.step) if isinstance(self.step, (list, tuple)) else ()
        are_integers = all(isinstance(n, int) and not isinstance(n, bool) for n in step)
        if not step or not are_integers or step[0] < 1 or any(later <= earlier for earlier, later in pairwise(step)):
            raise ConfigError(
                f"step={self.step!r} must be an increasing list of numbers of updates, the first at least 1"
            )
        object.__setattr__(self, "step", step)

    def _after_warmup(self, num_update: int) -> float:
        return self.base_lr * self.factor ** bisect_left(self.step, num_update)


@dataclass(frozen=True, kw_only=True)
class _DecayScheduler(Schedule):
    """Schedule from ``base_lr`` at the end of the warm-up to ``final_lr`` at update ``max_update``, where it stays."""

    max_update: int = field(metadata={"least": 1})
    final_lr: float = field(default=0.0, metadata={"least": 0.0})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_update <= self.warmup_steps:
            raise ConfigError(f"max_update={self.max_update} must be above warmup_steps={self.warmup_steps}")

    def _after_warmup(self, num_update: int) -> float:
        done = min((num_update - self.warmup_steps) / (self.max_update - self.warmup_steps), 1.0)
        return self.final_lr + (self.base_lr - self.final_lr) * self._remaining(done)

    @abstractmethod
    def _remaining(self, done: float) -> float:
        """Return a factor from 1 where ``done`` is 0 to 0 where it is 1."""


@dataclass(frozen=True, kw_only=True)
class PolyScheduler(_DecayScheduler):
    """``final_lr + (base_lr - final_lr) * (1 - done) ** pwr``, where ``done`` grows from 0 to 1 at ``max_update``."""

    name: ClassVar[str] = "poly"
    pwr: float = field(default=2.0, metadata={"least": 0.0})

    def _remaining(self, done: float) -> float:
        return (1.0 - done) ** self.pwr if done < 1.0 else 0.0


@dataclass(frozen=True, kw_only=True)
class CosineScheduler(_DecayScheduler):
    """``final_lr + (base_lr - final_lr) * (1 + cos(pi * done)) / 2``, ``done`` as in :class:`PolyScheduler`."""

    name: ClassVar[str] = "cosine"

    def _remaining(self, done: float) -> float:
        return (1.0 + math.cos(math.pi * done)) / 2.0


#: Every schedule by its name in a spec.
SCHEDULES: dict[str, type[Schedule]] = {
    kind.name: kind for kind in (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
}
