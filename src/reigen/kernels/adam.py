"""Blocks of the rules with a rate for each element: Adam, AdamW, AdaGrad, RMSProp, FTRL; and LAMB.

The kernels are those of `reigen.kernels.optimizer_update`, which describes their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reigen.kernels.optimizer_update import Array, LayerwiseKernel, UpdateKernel
from reigen.kernels.sgd import GradientTransform, apply_step, average_into, clip_to, sum_of_squares


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """Moments of Adam and its kin: ``m`` and ``v``, the moving averages of the gradient and of its square.

    Attributes:
        first, second: decay rates of ``m`` (beta1) and ``v`` (beta2).
        first_scale, second_scale: ``m`` and ``v`` are multiplied with these (bias correction) where they are used.
        epsilon: added to the root of the scaled ``v``.
    """

    first: float
    second: float
    epsilon: float
    first_scale: float = 1.0
    second_scale: float = 1.0

    def absorb(self, gradient: Array, states: Sequence[Array], spare: Array) -> None:
        """Take a prepared gradient into both averages. ``spare`` is overwritten."""
        mean, variance = states
        average_into(mean, gradient, self.first, spare)
        np.multiply(gradient, gradient, out=spare)
        average_into(variance, spare, self.second, spare)

    def direction(self, states: Sequence[Array], out: Array, factor: float = 1.0) -> None:
        """Compute ``factor * first_scale * m / (sqrt(second_scale * v) + epsilon)``."""
        mean, variance = states
        np.sqrt(variance, out=out)
        if self.second_scale != 1.0:
            np.multiply(out, math.sqrt(self.second_scale), out=out)
        np.add(out, self.epsilon, out=out)
        np.divide(mean, out, out=out)
        np.multiply(out, factor * self.first_scale, out=out)


@dataclass(frozen=True, slots=True)
class AdamKernel(UpdateKernel):
    """Adam (decay in the gradient) and AdamW (``decoupled``): ``w -= rate * (direction + decoupled * w)``."""

    gradient: GradientTransform
    moments: AdamMoments
    rate: float
    decoupled: float = 0.0
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        prepared, spare = scratch
        self.moments.absorb(self.gradient.prepare(grad, weight, prepared, spare), states, spare)
        self.moments.direction(states, spare, self.rate)
        apply_step(weight, spare, self.rate, self.decoupled, prepared)


@dataclass(frozen=True, slots=True)
class AdaGradKernel(UpdateKernel):
    """AdaGrad: ``h += g * g; w -= rate * (g / sqrt(h + epsilon) + decoupled * w)``."""

    gradient: GradientTransform
    rate: float
    epsilon: float
    decoupled: float
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        prepared, spare = scratch
        (history,) = states
        gradient = self.gradient.prepare(grad, weight, prepared, spare)
        np.multiply(gradient, gradient, out=spare)
        np.add(history, spare, out=history)
        np.add(history, self.epsilon, out=spare)
        np.sqrt(spare, out=spare)
        np.divide(gradient, spare, out=spare)
        np.multiply(spare, self.rate, out=spare)
        apply_step(weight, spare, self.rate, self.decoupled, prepared)


@dataclass(frozen=True, slots=True)
class RMSPropKernel(UpdateKernel):
    """RMSProp, of Tieleman and Hinton with one state, of Graves (centred) with three.

    ``n`` and ``m`` are the moving averages of ``g * g`` and ``g``. With one state
    ``w -= rate * g / sqrt(n + epsilon)``, with three ``d = momentum * d + rate * g / sqrt(n - m * m + epsilon);
    w -= d``. Then ``w`` is limited to ``clip_weights``, where that is given.
    """

    gradient: GradientTransform
    rate: float
    keep: float
    momentum: float
    epsilon: float
    clip_weights: float | None = None
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        prepared, spare = scratch
        gradient = self.gradient.prepare(grad, weight, prepared, spare)
        squares, *centring = states
        np.multiply(gradient, gradient, out=spare)
        average_into(squares, spare, self.keep, spare)
        if centring:
            mean, _ = centring
            average_into(mean, gradient, self.keep, spare)
            np.multiply(mean, mean, out=spare)
            np.subtract(squares, spare, out=spare)
            np.maximum(spare, 0.0, out=spare)  # of a gradient that is always the same, rounding leaves less than 0
            np.add(spare, self.epsilon, out=spare)
        else:
            np.add(squares, self.epsilon, out=spare)
        np.sqrt(spare, out=spare)
        np.divide(gradient, spare, out=spare)
        np.multiply(spare, self.rate, out=spare)
        if centring:
            _, delta = centring
            np.multiply(delta, self.momentum, out=delta)
            np.add(delta, spare, out=delta)
            spare = delta
        np.subtract(weight, spare, out=weight)
        if self.clip_weights is not None:
            clip_to(weight, self.clip_weights)


@dataclass(frozen=True, slots=True)
class FtrlKernel(UpdateKernel):
    """FTRL-Proximal: states ``z`` and ``n``.

    ``z += g - (sqrt(n + g * g) - sqrt(n)) * w / rate; n += g * g``, and ``w`` becomes minus ``z`` with ``lasso`` taken
    from its absolute value (0 where there is less), divided by ``(beta + sqrt(n)) / rate + decay``.
    """

    gradient: GradientTransform
    rate: float
    l1: float
    beta: float
    decay: float
    num_scratch: ClassVar[int] = 3

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        if self.rate == 0.0:  # the first step of a warm-up: nothing is learnt, and nothing is divided by 0
            return
        prepared, spare, root = scratch
        z, n = states
        gradient = self.gradient.prepare(grad, weight, prepared, spare)
        np.add(z, gradient, out=z)
        np.sqrt(n, out=root)
        np.multiply(gradient, gradient, out=spare)
        np.add(n, spare, out=n)
        np.sqrt(n, out=spare)
        np.subtract(spare, root, out=root)
        np.multiply(root, weight, out=root)
        np.divide(root, self.rate, out=root)
        np.subtract(z, root, out=z)
        np.add(spare, self.beta, out=spare)
        np.divide(spare, self.rate, out=spare)
        np.add(spare, self.decay, out=spare)
        # The result of soft thresholding is z minus z limited to +-lasso.
        np.copyto(root, z)
        clip_to(root, self.l1)
        np.subtract(root, z, out=root)
        np.divide(root, spare, out=weight)


@dataclass(frozen=True, slots=True)
class LambKernel(LayerwiseKernel):
    """LAMB: ``w -= rate * |w| / |u| * u`` (|w| limited; no factor if a norm is 0), ``u = direction + decay * w``."""

    gradient: GradientTransform
    moments: AdamMoments
    rate: float
    decay: float
    lower: float | None = None
    upper: float | None = None
    num_scratch: ClassVar[int] = 2

    def measure(
        self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]
    ) -> tuple[float, float]:
        """Take the gradient into the moments; return squares of the weight and of the direction ``u``."""
        prepared, spare = scratch
        self.moments.absorb(self.gradient.prepare(grad, weight, prepared, spare), states, spare)
        step = LambStepKernel(self.moments, 1.0, self.decay).direction(weight, states, scratch)
        return sum_of_squares(weight, spare), sum_of_squares(step, spare)

    def finish(self, first: float, second: float) -> UpdateKernel:
        """Return the step along ``u``, which is computed again: cheaper than memory for it."""
        of_weight, of_step = math.sqrt(first), math.sqrt(second)
        if self.lower is not None:
            of_weight = max(of_weight, self.lower)
        if self.upper is not None:
            of_weight = min(of_weight, self.upper)
        trust = of_weight / of_step if of_weight > 0.0 and of_step > 0.0 else 1.0
        return LambStepKernel(self.moments, self.rate * trust, self.decay)


@dataclass(frozen=True, slots=True)
class LambStepKernel(UpdateKernel):
    """``w -= rate * (direction + decay * w)`` with moments that are up to date: the second half of LAMB."""

    moments: AdamMoments
    rate: float
    decay: float
    num_scratch: ClassVar[int] = 2

    def direction(self, weight: Array, states: Sequence[Array], scratch: Sequence[Array]) -> Array:
        """Return ``rate * (direction + decay * w)``, in ``scratch[0]``."""
        out, spare = scratch
        self.moments.direction(states, out, self.rate)
        if self.decay:
            np.multiply(weight, self.rate * self.decay, out=spare)
            np.add(out, spare, out=out)
        return out

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        np.subtract(weight, self.direction(weight, states, scratch), out=weight)
