"""Blocks of gradient descent: SGD, NAG, Signum, LARS, and the preparation of gradients for every rule.

The kernels are those of `reigen.kernels.optimizer_update`, which describes their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reigen.kernels.optimizer_update import Array, LayerwiseKernel, UpdateKernel


@dataclass(frozen=True, slots=True)
class GradientTransform:
    """Preparation of a gradient: rescaled, clipped to ``[-clip, clip]`` if not None, ``decay`` times the weight added.

    ``clips_decay``: decay is added before the clipping, not after it.
    """

    rescale: float = 1.0
    clip: float | None = None
    decay: float = 0.0
    clips_decay: bool = False

    def prepare(self, grad: Array, weight: Array, out: Array, spare: Array, factor: float = 1.0) -> Array:
        """Return ``factor`` times the prepared gradient, in ``out``; or ``grad`` itself where it does not change."""
        folded = factor if self.clip is None else 1.0
        scale = self.rescale * folded
        if scale == 1.0 and self.clip is None and not self.decay:
            return grad
        np.multiply(grad, scale, out=out)
        if self.decay and (self.clips_decay or self.clip is None):
            np.multiply(weight, self.decay * folded, out=spare)
            np.add(out, spare, out=out)
        if self.clip is None:
            return out
        clip_to(out, self.clip)
        if self.decay and not self.clips_decay:
            np.multiply(weight, self.decay, out=spare)
            np.add(out, spare, out=out)
        if factor != 1.0:
            np.multiply(out, factor, out=out)
        return out


def clip_to(array: Array, bound: float) -> None:
    """Limit ``array`` to ``[-bound, bound]`` in place. NaN stays NaN."""
    np.minimum(array, bound, out=array)
    np.maximum(array, -bound, out=array)


def average_into(average: Array, new: Array, keep: float, spare: Array) -> None:
    """Compute ``average = keep * average + (1 - keep) * new``. ``spare`` is overwritten, and may be ``new``."""
    np.multiply(new, 1.0 - keep, out=spare)
    np.multiply(average, keep, out=average)
    np.add(average, spare, out=average)


def apply_step(weight: Array, step: Array, rate: float, decoupled: float, spare: Array) -> None:
    """Compute ``weight -= step + rate * decoupled * weight``. ``step`` and ``spare`` are overwritten."""
    if decoupled:
        np.multiply(weight, rate * decoupled, out=spare)
        np.add(step, spare, out=step)
    np.subtract(weight, step, out=weight)


@dataclass(frozen=True, slots=True)
class SGDKernel(UpdateKernel):
    """SGD. With a state: ``s = momentum * s + rate * g; w -= s``, else ``w -= rate * g``."""

    gradient: GradientTransform
    rate: float
    momentum: float = 0.0
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        step = self.gradient.prepare(grad, weight, scratch[0], scratch[1], self.rate)
        for state in states:
            np.multiply(state, self.momentum, out=state)
            np.add(state, step, out=state)
            step = state
        np.subtract(weight, step, out=weight)


@dataclass(frozen=True, slots=True)
class NesterovKernel(UpdateKernel):
    """NAG: ``s = momentum * s + rate * g; w -= momentum * s + rate * g``."""

    gradient: GradientTransform
    rate: float
    momentum: float
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        ahead = scratch[1]
        step = self.gradient.prepare(grad, weight, scratch[0], ahead, self.rate)
        (state,) = states
        np.multiply(state, self.momentum, out=state)
        np.add(state, step, out=state)
        np.multiply(state, self.momentum, out=ahead)
        np.add(ahead, step, out=ahead)
        np.subtract(weight, ahead, out=weight)


@dataclass(frozen=True, slots=True)
class SignumKernel(UpdateKernel):
    """Signum: ``s = momentum * s + (1 - momentum) * g; w -= rate * (sign(s) + decoupled * w)``.

    Without a state the sign is the gradient's.
    """

    gradient: GradientTransform
    rate: float
    momentum: float
    decoupled: float
    num_scratch: ClassVar[int] = 2

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        signs, spare = scratch
        direction = self.gradient.prepare(grad, weight, signs, spare)
        for state in states:
            average_into(state, direction, self.momentum, spare)
            direction = state
        np.sign(direction, out=signs)
        np.multiply(signs, self.rate, out=signs)
        apply_step(weight, signs, self.rate, self.decoupled, spare)


@dataclass(frozen=True, slots=True)
class AccumulateKernel(UpdateKernel):
    """MXNet's optimizer ``test``: ``w += rescale * g``."""

    rescale: float
    num_scratch: ClassVar[int] = 1

    def __call__(self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]) -> None:
        np.multiply(grad, self.rescale, out=scratch[0])
        np.add(weight, scratch[0], out=weight)


@dataclass(frozen=True, slots=True)
class LarsKernel(LayerwiseKernel):
    """LARS: SGD at ``rate * eta * |w| / (|rescale * g| + decay * |w| + epsilon)``; at ``rate`` where a norm is 0."""

    gradient: GradientTransform
    rate: float
    momentum: float
    eta: float
    epsilon: float
    num_scratch: ClassVar[int] = 2

    def measure(
        self, weight: Array, grad: Array, states: Sequence[Array], scratch: Sequence[Array]
    ) -> tuple[float, float]:
        """Return squares of the weight and of the rescaled gradient, not clipped or decayed (as in MXNet)."""
        rescaled = np.multiply(grad, self.gradient.rescale, out=scratch[0])
        return sum_of_squares(weight, scratch[1]), sum_of_squares(rescaled, scratch[1])

    def finish(self, first: float, second: float) -> UpdateKernel:
        """Return SGD with the layer's rate."""
        of_weight, of_gradient = math.sqrt(first), math.sqrt(second)
        rate = self.rate
        if of_weight > 0.0 and of_gradient > 0.0:
            rate *= self.eta * of_weight / (of_gradient + self.gradient.decay * of_weight + self.epsilon)
        return SGDKernel(self.gradient, rate, self.momentum)


def sum_of_squares(array: Array, spare: Array) -> float:
    """Return the sum of squares of all elements, added pairwise in the array's type. ``spare`` is overwritten."""
    return float(np.add.reduce(np.multiply(array, array, out=spare)))
