"""Base of all optimizers: their numbers, their specs, and the call of an update.

An optimizer is a frozen set of names and numbers. It keeps nothing: states belong to the piece of a weight that they
update (`reigen.optim.optimizer_state`). So it travels as a dict of plain values (`to_spec`, `from_spec`), never as
code, and any number of threads may use it.
"""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError, UnsupportedTypeError
from reigen.kernels.optimizer_update import (
    Array,
    Arrays,
    BlockUpdate,
    LayerwiseUpdate,
    UpdateOperands,
    clip_to,
    run_update,
    run_update_on_rows,
)
from reigen.optim.checks import check_fields
from reigen.optim.schedules import Schedule
from reigen.types import DType, dtype_named

#: A key of a store: an integer or a name.
Key = int | str


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """Numbers of one update of one key.

    Attributes:
        t: number of the update of this piece, from 1.
        rate: learning rate, multiplier included.
        decay: weight decay, multiplier included.
        base: learning rate without the multiplier.
        last_base: ``base`` of the update before; the same in the first one.
    """

    t: int
    rate: float
    decay: float
    base: float
    last_base: float


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Names and numbers of an update rule. The parameters below belong to all rules; they are MXNet's.

    Args:
        learning_rate: default: the schedule's ``base_lr``, or the rule's own. It replaces ``base_lr``.
        wd: weight decay; its effect depends on the rule.
        rescale_grad: every gradient is multiplied with this, usually 1 / (batch size * workers).
        clip_gradient: largest absolute value of an element of the rescaled gradient; None, 0 or less: no limit.
        lr_scheduler: gives the learning rate of each update.
        multi_precision: keep a float32 copy of a float16 or bfloat16 weight, update that, and round it.
        begin_num_update: updates count from here on (training that goes on).
        lr_mult, wd_mult: key -> factor of its learning rate or weight decay.
        param_idx2name: key -> name, by which ``lr_mult``, ``wd_mult`` and LARS's exceptions are found, too.

    Raises:
        ConfigError: a number of the wrong type or outside its limits.
    """

    #: Name in a spec.
    name: ClassVar[str]
    #: Learning rate where neither the user nor a schedule gives one.
    default_rate: ClassVar[float] = 0.01
    #: Whether each element is updated by itself. Where not (LAMB, LARS), an update needs the whole weight.
    is_elementwise: ClassVar[bool] = True
    _always_lazy: ClassVar[bool] = False
    _states: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = cast(float, None)  # never None once made
    wd: float = field(default=0.0, metadata={"least": 0.0})
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    lr_scheduler: Schedule | None = None
    multi_precision: bool = False
    begin_num_update: int = field(default=0, metadata={"least": 0})
    lr_mult: Mapping[Key, float] = field(default_factory=dict)
    wd_mult: Mapping[Key, float] = field(default_factory=dict)
    param_idx2name: Mapping[Key, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scheduler = self.lr_scheduler
        if scheduler is not None and not isinstance(scheduler, Schedule):
            raise ConfigError(f"lr_scheduler={scheduler!r} is no schedule of reigen.optim")
        value: Any = self.learning_rate
        if value is None:
            rate = self.default_rate if scheduler is None else scheduler.base_lr
            object.__setattr__(self, "learning_rate", rate)
        check_fields(self)
        if scheduler is not None and scheduler.base_lr != self.learning_rate:
            object.__setattr__(self, "lr_scheduler", replace(scheduler, base_lr=self.learning_rate))
        if self.clip_gradient is not None and self.clip_gradient <= 0.0:  # MXNet's -1
            object.__setattr__(self, "clip_gradient", None)
        for name in ("lr_mult", "wd_mult"):
            object.__setattr__(self, name, _factors(name, getattr(self, name)))
        names = {_key("param_idx2name", key): str(value) for key, value in dict(self.param_idx2name).items()}
        object.__setattr__(self, "param_idx2name", names)

    # ---- rules

    @property
    def is_lazy(self) -> bool:
        """True if a sparse gradient updates only its rows. Otherwise the other rows get a gradient of 0."""
        return self._always_lazy

    @property
    def state_names(self) -> tuple[str, ...]:
        """Name of each array that is kept for a weight."""
        return self._states

    @abstractmethod
    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        """Update one block: see `BlockUpdate`."""

    def _kernel(self, rates: UpdateRates, key: Key | None) -> BlockUpdate | LayerwiseUpdate:
        """Return one update with its numbers filled in."""
        return partial(self._update, rates)

    def _prepare(
        self,
        grad: Array,
        weight: Array,
        scratch: Arrays,
        decay: float = 0.0,
        *,
        clips_decay: bool = False,
        factor: float = 1.0,
    ) -> Array:
        """Return ``factor`` times ``clip(rescale_grad * grad) + decay * weight``; ``clips_decay``: all of it clipped.

        It lies in ``scratch[0]``, or is ``grad`` itself where that does not change; ``scratch[1]`` is overwritten.
        """
        out, temporary, *_ = scratch
        clip = self.clip_gradient
        folded = factor if clip is None else 1.0
        scale = self.rescale_grad * folded
        if scale == 1.0 and clip is None and not decay:
            return grad
        np.multiply(grad, scale, out=out)
        if clip is not None and not clips_decay:
            clip_to(out, clip)
        if decay:
            np.multiply(weight, decay * folded, out=temporary)
            np.add(out, temporary, out=out)
        if clip is not None:
            if clips_decay:
                clip_to(out, clip)
            if factor != 1.0:
                np.multiply(out, factor, out=out)
        return out

    # ---- numbers

    @property
    def num_states(self) -> int:
        """Number of arrays that are kept for a weight, each as large as the weight (without its float32 copy)."""
        return len(self.state_names)

    def rate_of(self, num_update: int) -> float:
        """Return the learning rate of update ``num_update`` (from 1) of a key without a multiplier."""
        return self.learning_rate if self.lr_scheduler is None else self.lr_scheduler(num_update)

    def replace(self, **changes: Any) -> Self:
        """Return the same optimizer with other numbers; raises ConfigError."""
        known = {item.name for item in fields(self)}
        if unknown := set(changes) - known:
            raise ConfigError(f"{self.name} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
        return replace(self, **changes)

    def with_learning_rate(self, learning_rate: float) -> Self:
        """Return the same optimizer at another learning rate.

        Raises:
            ArgumentError: the learning rate is the schedule's.
            ConfigError: it is no finite number.
        """
        if self.lr_scheduler is not None:
            raise ArgumentError(
                f"the learning rate comes from the schedule {self.lr_scheduler.name!r}; "
                "it can be set only where the optimizer has no lr_scheduler"
            )
        return replace(self, learning_rate=learning_rate)

    def _factor(self, factors: Mapping[Key, float], key: Key | None) -> float:
        if key is None:
            return 1.0
        return factors.get(key, factors.get(self.param_idx2name.get(key, key), 1.0))

    # ---- updates

    def step(
        self,
        t: int,
        *,
        key: Key | None = None,
        num_update: int | None = None,
        multipliers: tuple[float, float] = (1.0, 1.0),
        last_rate: float | None = None,
    ) -> Step:
        """Make one update of one key, ready to run on any number of its pieces.

        Args:
            t: number of the update of the piece, from 1 (``begin_num_update`` included): Adam's bias correction.
            key: for the factors of ``lr_mult`` and ``wd_mult``.
            num_update: argument of the schedule; default ``t``. Where each worker is applied by itself, its own
                number of pushes: n workers must not make the rate fall n times faster.
            multipliers: further factors of the learning rate and of the weight decay.
            last_rate: the learning rate of the update before, without multipliers; default: the schedule's.
        """
        count = t if num_update is None else num_update
        base = self.rate_of(count)
        if last_rate is None:
            last_rate = self.rate_of(count - 1) if count > self.begin_num_update + 1 else base
        rate = base * self._factor(self.lr_mult, key) * multipliers[0]
        decay = self.wd * self._factor(self.wd_mult, key) * multipliers[1]
        return Step(self._kernel(UpdateRates(t, rate, decay, base, last_rate), key), base)

    def update(
        self,
        weight: NDArray[Any],
        grad: NDArray[Any],
        states: Sequence[NDArray[Any]],
        t: int,
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
    ) -> None:
        """Update ``weight`` and ``states`` in place.

        Args:
            weight: flat float32 or float64; for a layer-wise rule the whole weight.
            grad: as long as ``weight``, any floating NumPy type; only read.
            states: ``num_states`` arrays like ``weight``, zeros before the first update.
            t: number of the update, from 1.
            lr_mult: factor of the learning rate.
            wd_mult: factor of the weight decay.

        Raises:
            UnsupportedTypeError: no floating type, or a half type (`Slot` takes those).
            ArgumentError: the arrays do not fit together.
        """
        kinds = dtype_named(weight.dtype.name), dtype_named(grad.dtype.name)
        if kinds[0].name not in {"float32", "float64"} or not kinds[1].is_floating:
            raise UnsupportedTypeError(f"a {kinds[0].name} weight cannot be updated with a {kinds[1].name} gradient")
        if len(states) != self.num_states:
            raise ArgumentError(f"{self.name} keeps {self.num_states} states, not {len(states)}")
        if any(len(array) != len(weight) for array in (grad, *states)):
            raise ArgumentError("weight, gradient and states must be equally long")
        self.step(t, multipliers=(lr_mult, wd_mult)).run(UpdateOperands(weight, grad, states, *kinds))

    # ---- plain values

    def to_spec(self) -> dict[str, Any]:
        """Return name and numbers: dict, list, str, int, float, bool and None only, for `from_spec`."""
        spec: dict[str, Any] = {"name": self.name}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Schedule):
                value = {"name": value.name, **{part.name: getattr(value, part.name) for part in fields(value)}}
                value = {name: list(part) if isinstance(part, tuple) else part for name, part in value.items()}
            elif isinstance(value, Mapping):
                value = [[key, factor] for key, factor in value.items()]  # JSON has no integer keys
            elif isinstance(value, tuple):
                value = list(value)
            spec[item.name] = value
        return spec


@dataclass(frozen=True, slots=True)
class Step:
    """Update with its numbers filled in.

    Attributes:
        kernel: computes it.
        rate: the learning rate without multipliers, the ``last_rate`` of the next `Optimizer.step`.
    """

    kernel: BlockUpdate | LayerwiseUpdate
    rate: float

    @property
    def needs_whole(self) -> bool:
        """True if it can run only on a whole weight, not on its pieces."""
        return isinstance(self.kernel, LayerwiseUpdate)

    def run(self, operands: UpdateOperands) -> None:
        """Update one piece, of any length; where `needs_whole`, the whole weight."""
        run_update(self.kernel, operands)

    def run_rows(self, operands: UpdateOperands, rows: NDArray[np.int64], row_length: int) -> None:
        """Update some rows and their states, as `run_update_on_rows`; ArgumentError with a layer-wise rule."""
        if isinstance(self.kernel, LayerwiseUpdate):
            raise ArgumentError("a layer-wise optimizer cannot update single rows")
        run_update_on_rows(self.kernel, operands, rows, row_length)


def states_type(weight_type: DType) -> DType:
    """Return the type of states, and of the float32 copy of a half weight: float64 for float64, else float32."""
    return weight_type if weight_type.name == "float64" else dtype_named("float32")


def _key(name: str, key: Any) -> Key:
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ConfigError(f"{name}: {key!r} is no key; a key is an integer or a text")
    return key


def _factors(name: str, factors: Mapping[Key, float]) -> dict[Key, float]:
    result: dict[Key, float] = {}
    for key, factor in dict[Any, Any](factors).items():
        is_number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
        if not is_number or not 0.0 <= factor < 2**63:
            raise ConfigError(f"{name}[{key!r}]={factor!r} must be a finite number, at least 0")
        result[_key(name, key)] = float(factor)
    return result
