"""Update rules. In the formulas ``g`` is ``clip(rescale_grad * grad)``, ``lr`` and ``wd`` have their multipliers.

Names, defaults and formulas are those of MXNet 1.9.1, unless a rule says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from reigen.errors import ConfigError
from reigen.kernels.optimizer_update import Array, Arrays, BlockUpdate, LayerwiseUpdate, clip_to
from reigen.optim.base import Key, Optimizer, UpdateRates

_NOT_NEGATIVE = {"least": 0.0}
_FRACTION = {"least": 0.0, "below": 1.0}


@dataclass(frozen=True, kw_only=True)
class _WithMomentum(Optimizer):
    momentum: float = field(default=0.0, metadata=_FRACTION)

    @property
    def state_names(self) -> tuple[str, ...]:
        """``m``, or nothing without momentum."""
        return ("momentum",) if self.momentum else ()

    def _momentum(self, rates: UpdateRates) -> float:
        return self.momentum

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        """Compute ``m = momentum * m + lr * (g + wd * w); w -= m``, without a state ``w -= lr * (g + wd * w)``."""
        step = self._prepare(grad, weight, scratch, rates.decay, factor=rates.rate)
        for state in states:
            np.multiply(state, self._momentum(rates), out=state)
            step = np.add(state, step, out=state)
        np.subtract(weight, step, out=weight)


@dataclass(frozen=True, kw_only=True)
class _WithMoments(Optimizer):
    """Adam and its kin: ``m`` and ``v``, the moving averages of the gradient and of its square."""

    default_rate: ClassVar[float] = 0.001
    _states: ClassVar[tuple[str, ...]] = ("mean", "variance")
    beta1: float = field(default=0.9, metadata=_FRACTION)
    beta2: float = field(default=0.999, metadata=_FRACTION)
    epsilon: float = field(default=1e-8, metadata=_NOT_NEGATIVE)

    def _absorb(self, gradient: Array, states: Arrays, temporary: Array) -> None:
        """Take a prepared gradient into both averages. ``temporary`` is overwritten."""
        mean, variance = states
        _average_into(mean, gradient, self.beta1, temporary)
        np.multiply(gradient, gradient, out=temporary)
        _average_into(variance, temporary, self.beta2, temporary)

    def _direction(self, states: Arrays, out: Array, factor: float, corrected_at: int | None = None) -> None:
        """Compute ``factor * m' / (sqrt(v') + epsilon)``; bias is corrected at update ``corrected_at``, if at any."""
        mean, variance = states
        np.sqrt(variance, out=out)
        if corrected_at is not None:
            np.multiply(out, math.sqrt(1.0 / (1.0 - self.beta2**corrected_at)), out=out)
            factor *= 1.0 / (1.0 - self.beta1**corrected_at)
        np.add(out, self.epsilon, out=out)
        np.divide(mean, out, out=out)
        np.multiply(out, factor, out=out)


@dataclass(frozen=True, kw_only=True)
class _WithLazyUpdate(Optimizer):
    lazy_update: bool = True

    @property
    def is_lazy(self) -> bool:
        """``lazy_update``."""
        return self.lazy_update


@dataclass(frozen=True, kw_only=True)
class SGD(_WithMomentum, _WithLazyUpdate):
    """Stochastic gradient descent: ``m = momentum * m + lr * (g + wd * w); w -= m``.

    Args:
        momentum: 0 <= momentum < 1; 0 keeps no state.
        lazy_update: a sparse gradient updates (and decays) only its rows.

    """

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True, kw_only=True)
class NAG(_WithMomentum):
    """Nesterov: ``d = lr * (g + wd * w); m = momentum * m + d; w -= momentum * m + d``.

    MXNet 1.9.1 takes the decay in ``m`` from the weight that it has just updated, against its documentation; this does
    not.

    Args:
        momentum: 0 <= momentum < 1; 0 is SGD and keeps no state.
    """

    name: ClassVar[str] = "nag"

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        step = self._prepare(grad, weight, scratch, rates.decay, factor=rates.rate)
        for state in states:
            np.multiply(state, self.momentum, out=state)
            np.add(state, step, out=state)
            ahead = np.multiply(state, self.momentum, out=scratch[1])
            step = np.add(ahead, step, out=ahead)
        np.subtract(weight, step, out=weight)


@dataclass(frozen=True, kw_only=True)
class Signum(_WithMomentum):
    """``m = momentum * m + (1 - momentum) * (g + wd * w); w -= lr * (sign(m) + wd_lh * w)``.

    With momentum 0 it is signSGD and keeps no state: ``w -= lr * (sign(g) + wd * w)``. ``wd_lh`` is decay that does not
    go through the sign (with momentum).
    """

    name: ClassVar[str] = "signum"
    momentum: float = field(default=0.9, metadata=_FRACTION)
    wd_lh: float = field(default=0.0, metadata=_NOT_NEGATIVE)

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        signs, temporary, *_ = scratch
        direction = self._prepare(grad, weight, scratch, rates.decay if self.momentum else 0.0)
        for state in states:
            _average_into(state, direction, self.momentum, temporary)
            direction = state
        np.sign(direction, out=signs)
        np.multiply(signs, rates.rate, out=signs)
        _apply_step(weight, signs, rates.rate, self.wd_lh if self.momentum else rates.decay, temporary)


@dataclass(frozen=True, kw_only=True)
class Test(Optimizer):
    """``w += rescale_grad * grad`` for tests of stores, since its sums are exact. MXNet's keeps a state."""

    __test__: ClassVar[bool] = False  # no test for pytest
    name: ClassVar[str] = "test"
    _always_lazy: ClassVar[bool] = True

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        np.add(weight, np.multiply(grad, self.rescale_grad, out=scratch[0]), out=weight)


@dataclass(frozen=True, kw_only=True)
class Adam(_WithMoments, _WithLazyUpdate):
    """Adam (Kingma, Ba), the decay in the gradient and clipped with it: ``g = clip(rescale_grad * grad + wd * w)``.

    ``m`` and ``v`` are moving averages of ``g`` and ``g * g``;
    ``w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)``.

    Args:
        beta1, beta2: decay rates of the averages ``m`` and ``v``.
        epsilon: keeps the quotient finite.
        lazy_update: a sparse gradient updates only its rows.
    """

    name: ClassVar[str] = "adam"

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        step = scratch[1]
        self._absorb(self._prepare(grad, weight, scratch, rates.decay, clips_decay=True), states, step)
        scale = math.sqrt(1.0 - self.beta2**rates.t) / (1.0 - self.beta1**rates.t)
        self._direction(states, step, rates.rate * scale)
        np.subtract(weight, step, out=weight)


@dataclass(frozen=True, kw_only=True)
class AdamW(_WithMoments, _WithLazyUpdate):
    """Adam with decay of its own (Loshchilov, Hutter): ``w -= lr * (m' / (sqrt(v') + epsilon) + wd * w)``.

    ``m' = m / (1 - beta1**t)`` and ``v' = v / (1 - beta2**t)``: torch's formula. MXNet 1.9.1 has an operator for it,
    but no optimizer. The default of ``wd`` is 0, as everywhere here; torch's is 0.01. Parameters are those of `Adam`.
    """

    name: ClassVar[str] = "adamw"

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        step = scratch[1]
        self._absorb(self._prepare(grad, weight, scratch), states, step)
        self._direction(states, step, rates.rate, corrected_at=rates.t)
        _apply_step(weight, step, rates.rate, rates.decay, scratch[0])


@dataclass(frozen=True, kw_only=True)
class AdaGrad(Optimizer):
    """AdaGrad (Duchi et al.): ``h += g * g; w -= lr * (g / sqrt(h + eps) + wd * w)``. Sparse gradients: always lazy."""

    name: ClassVar[str] = "adagrad"
    _states: ClassVar[tuple[str, ...]] = ("history",)
    _always_lazy: ClassVar[bool] = True
    eps: float = field(default=1e-7, metadata=_NOT_NEGATIVE)

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        prepared, step, *_ = scratch
        (history,) = states
        gradient = self._prepare(grad, weight, scratch)
        np.multiply(gradient, gradient, out=step)
        np.add(history, step, out=history)
        _divide_by_root(gradient, history, self.eps, rates.rate, step)
        _apply_step(weight, step, rates.rate, rates.decay, prepared)


@dataclass(frozen=True, kw_only=True)
class RMSProp(Optimizer):
    """RMSProp: ``g = clip(rescale_grad * grad + wd * w)``, and ``n`` is the moving average of ``g * g``.

    ``centered=False`` (Tieleman, Hinton): ``w -= lr * g / sqrt(n + epsilon)``. ``centered=True`` (Graves), with ``m``
    the moving average of ``g``: ``d = gamma2 * d + lr * g / sqrt(n - m * m + epsilon); w -= d``. Where rounding makes
    ``n - m * m`` negative it counts as 0; MXNet and torch take its root.

    Args:
        gamma1: decay rate of ``n`` and ``m``.
        gamma2: decay rate of ``d``, where centred.
        epsilon: keeps the quotient finite.
        centered: whether it is Graves's.
        clip_weights: largest absolute value of a weight; None, 0 or less: no limit.
    """

    name: ClassVar[str] = "rmsprop"
    default_rate: ClassVar[float] = 0.001
    gamma1: float = field(default=0.9, metadata=_FRACTION)
    gamma2: float = field(default=0.9, metadata=_FRACTION)
    epsilon: float = field(default=1e-8, metadata=_NOT_NEGATIVE)
    centered: bool = False
    clip_weights: float | None = None

    @property
    def state_names(self) -> tuple[str, ...]:
        """``n``, and where centred ``m`` and ``d``."""
        return ("squares", "mean", "delta") if self.centered else ("squares",)

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        step = scratch[1]
        gradient = self._prepare(grad, weight, scratch, rates.decay, clips_decay=True)
        squares, *centring = states
        np.multiply(gradient, gradient, out=step)
        _average_into(squares, step, self.gamma1, step)
        if centring:
            mean, delta = centring
            _average_into(mean, gradient, self.gamma1, step)
            np.multiply(mean, mean, out=step)
            np.subtract(squares, step, out=step)
            np.maximum(step, 0.0, out=step)  # of a gradient that is always the same, rounding leaves less than 0
            _divide_by_root(gradient, step, self.epsilon, rates.rate, step)
            np.multiply(delta, self.gamma2, out=delta)
            step = np.add(delta, step, out=delta)
        else:
            _divide_by_root(gradient, squares, self.epsilon, rates.rate, step)
        np.subtract(weight, step, out=weight)
        if self.clip_weights and self.clip_weights > 0.0:
            clip_to(weight, self.clip_weights)


@dataclass(frozen=True, kw_only=True)
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al., 2013), sparse by its L1 term. Sparse gradients: always lazy.

    ``z += g - (sqrt(n + g * g) - sqrt(n)) * w / lr; n += g * g``;
    ``w = (sign(z) * lamda1 - z) / ((beta + sqrt(n)) / lr + wd)`` where ``abs(z) > lamda1``, else 0.

    Args:
        lamda1: L1 regularization (MXNet's spelling).
        beta: added to the root of ``n``; above 0 unless ``wd`` is.
    """

    name: ClassVar[str] = "ftrl"
    default_rate: ClassVar[float] = 0.1
    _states: ClassVar[tuple[str, ...]] = ("z", "n")
    _always_lazy: ClassVar[bool] = True
    lamda1: float = field(default=0.01, metadata=_NOT_NEGATIVE)
    beta: float = field(default=1.0, metadata=_NOT_NEGATIVE)

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        if rates.rate == 0.0:  # the first step of a warm-up: nothing is learnt, and nothing is divided by 0
            return
        _, temporary, root = scratch
        z, n = states
        gradient = self._prepare(grad, weight, scratch)
        np.add(z, gradient, out=z)
        np.sqrt(n, out=root)
        np.multiply(gradient, gradient, out=temporary)
        np.add(n, temporary, out=n)
        np.sqrt(n, out=temporary)
        np.subtract(temporary, root, out=root)
        np.multiply(root, weight, out=root)
        np.divide(root, rates.rate, out=root)
        np.subtract(z, root, out=z)
        np.add(temporary, self.beta, out=temporary)
        np.divide(temporary, rates.rate, out=temporary)
        np.add(temporary, rates.decay, out=temporary)
        # The result of soft thresholding is z minus z limited to +-lamda1.
        np.copyto(root, z)
        clip_to(root, self.lamda1)
        np.subtract(root, z, out=root)
        np.divide(root, temporary, out=weight)


@dataclass(frozen=True, kw_only=True)
class LAMB(_WithMoments):
    """LAMB (You et al., 2020): ``u = m' / (sqrt(v') + epsilon) + wd * w; w -= lr * |w| / |u| * u``. Layer-wise.

    ``m'`` and ``v'`` as in :class:`AdamW`. Where a norm is 0, the quotient is 1.

    Args:
        beta1, beta2: decay rates of the averages ``m`` and ``v``.
        epsilon: keeps the quotient finite.
        lower_bound, upper_bound: limits of ``|w|`` in the quotient; None, 0 or less: no limit.
        bias_correction: False: ``m' = m``, ``v' = v``.
    """

    name: ClassVar[str] = "lamb"
    is_elementwise: ClassVar[bool] = False
    epsilon: float = field(default=1e-6, metadata=_NOT_NEGATIVE)
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True

    def _kernel(self, rates: UpdateRates, key: Key | None) -> LayerwiseUpdate:
        return LayerwiseUpdate(partial(self._measure, rates), partial(self._finish, rates))

    def _measure(
        self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays
    ) -> tuple[float, float]:
        """Take the gradient into the moments; return squares of the weight and of the direction ``u``."""
        self._absorb(self._prepare(grad, weight, scratch), states, scratch[1])
        direction = self._step(replace(rates, rate=1.0), weight, states, scratch)
        return _sum_of_squares(weight, scratch[1]), _sum_of_squares(direction, scratch[1])

    def _finish(self, rates: UpdateRates, weight_squares: float, step_squares: float) -> BlockUpdate:
        weight_norm, step_norm = math.sqrt(weight_squares), math.sqrt(step_squares)
        if self.lower_bound and self.lower_bound > 0.0:
            weight_norm = max(weight_norm, self.lower_bound)
        if self.upper_bound and self.upper_bound > 0.0:
            weight_norm = min(weight_norm, self.upper_bound)
        trust = weight_norm / step_norm if weight_norm > 0.0 and step_norm > 0.0 else 1.0
        return partial(self._update, replace(rates, rate=rates.rate * trust))

    def _update(self, rates: UpdateRates, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> None:
        """Step along ``u``, which is computed again: cheaper than memory for it."""
        np.subtract(weight, self._step(rates, weight, states, scratch), out=weight)

    def _step(self, rates: UpdateRates, weight: Array, states: Arrays, scratch: Arrays) -> Array:
        """Return ``lr * u``, in ``scratch[0]``."""
        step, temporary, *_ = scratch
        self._direction(states, step, rates.rate, rates.t if self.bias_correction else None)
        if rates.decay:
            np.multiply(weight, rates.rate * rates.decay, out=temporary)
            np.add(step, temporary, out=step)
        return step


@dataclass(frozen=True, kw_only=True)
class LARS(_WithMomentum):
    """LARS (You et al., 2017): SGD at ``lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps)``. Layer-wise.

    At ``lr`` where a norm is 0, and for keys whose name ends with one of ``skip``. The norm is that of the gradient
    before it is clipped or decayed, as in MXNet.

    Args:
        momentum: 0 <= momentum < 1; 0 keeps no state.
        eta: the trust coefficient.
        eps: added to the norms.
        momentum_correction: multiply the momentum with ``lr / (lr of the update before)`` (Goyal et al., 2017).
        skip: ends of the names of keys that get no rate of their own: biases, batch normalization.
    """

    name: ClassVar[str] = "lars"
    is_elementwise: ClassVar[bool] = False
    eta: float = field(default=0.001, metadata=_NOT_NEGATIVE)
    eps: float = field(default=0.0, metadata=_NOT_NEGATIVE)
    momentum_correction: bool = True
    skip: Sequence[str] = ("gamma", "beta", "bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.skip, str) or not all(isinstance(end, str) and end for end in self.skip):
            raise ConfigError(f"LARS: skip={self.skip!r} must be a list of ends of names")
        object.__setattr__(self, "skip", tuple(self.skip))

    def _momentum(self, rates: UpdateRates) -> float:
        is_corrected = self.momentum_correction and rates.last_base
        return self.momentum * (rates.base / rates.last_base) if is_corrected else self.momentum

    def _kernel(self, rates: UpdateRates, key: Key | None) -> BlockUpdate | LayerwiseUpdate:
        name = "" if key is None else str(self.param_idx2name.get(key, key))
        if name.endswith(tuple(self.skip)):
            return partial(self._update, rates)
        return LayerwiseUpdate(self._measure, partial(self._finish, rates))

    def _measure(self, weight: Array, grad: Array, states: Arrays, scratch: Arrays) -> tuple[float, float]:
        rescaled = np.multiply(grad, self.rescale_grad, out=scratch[0])
        return _sum_of_squares(weight, scratch[1]), _sum_of_squares(rescaled, scratch[1])

    def _finish(self, rates: UpdateRates, weight_squares: float, grad_squares: float) -> BlockUpdate:
        weight_norm, grad_norm, rate = math.sqrt(weight_squares), math.sqrt(grad_squares), rates.rate
        if weight_norm > 0.0 and grad_norm > 0.0:
            rate *= self.eta * weight_norm / (grad_norm + rates.decay * weight_norm + self.eps)
        return partial(self._update, replace(rates, rate=rate))


def _average_into(average: Array, new: Array, keep: float, temporary: Array) -> None:
    """Compute ``average = keep * average + (1 - keep) * new``. ``temporary`` is overwritten, and may be ``new``."""
    np.multiply(new, 1.0 - keep, out=temporary)
    np.multiply(average, keep, out=average)
    np.add(average, temporary, out=average)


def _divide_by_root(gradient: Array, squares: Array, epsilon: float, rate: float, out: Array) -> None:
    """Compute ``out = rate * gradient / sqrt(squares + epsilon)``. ``out`` may be ``squares``."""
    np.add(squares, epsilon, out=out)
    np.sqrt(out, out=out)
    np.divide(gradient, out, out=out)
    np.multiply(out, rate, out=out)


def _apply_step(weight: Array, step: Array, rate: float, decoupled: float, temporary: Array) -> None:
    """Compute ``weight -= step + rate * decoupled * weight``. ``step`` and ``temporary`` are overwritten."""
    if decoupled:
        np.multiply(weight, rate * decoupled, out=temporary)
        np.add(step, temporary, out=step)
    np.subtract(weight, step, out=weight)


def _sum_of_squares(array: Array, temporary: Array) -> float:
    """Return the sum of squares of all elements, added pairwise in the array's type. ``temporary`` is overwritten."""
    return float(np.add.reduce(np.multiply(array, array, out=temporary)))
