"""Update rules. In the formulas ``g`` is ``clip(rescale_grad * grad)``, ``lr`` and ``wd`` have their multipliers.

Names, defaults and formulas are those of MXNet 1.9.1, unless a rule says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from reigen.errors import ConfigError
from reigen.kernels import adam, sgd
from reigen.kernels.optimizer_update import LayerwiseKernel, UpdateKernel
from reigen.optim.base import Key, Optimizer, UpdateRates, make_gradient_transform

_NOT_NEGATIVE = {"least": 0.0}
_FRACTION = {"least": 0.0, "below": 1.0}


@dataclass(frozen=True, kw_only=True)
class _WithMomentum(Optimizer):
    momentum: float = field(default=0.0, metadata=_FRACTION)

    @property
    def state_names(self) -> tuple[str, ...]:
        """``m``, or nothing without momentum."""
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True, kw_only=True)
class _WithMoments(Optimizer):
    default_rate: ClassVar[float] = 0.001
    beta1: float = field(default=0.9, metadata=_FRACTION)
    beta2: float = field(default=0.999, metadata=_FRACTION)
    epsilon: float = field(default=1e-8, metadata=_NOT_NEGATIVE)

    @property
    def state_names(self) -> tuple[str, ...]:
        """``m`` and ``v``."""
        return ("mean", "variance")

    def _corrected_moments(self, t: int) -> adam.AdamMoments:
        scales = 1.0 / (1.0 - self.beta1**t), 1.0 / (1.0 - self.beta2**t)
        return adam.AdamMoments(self.beta1, self.beta2, self.epsilon, *scales)


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

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        return sgd.SGDKernel(make_gradient_transform(self, rates.decay), rates.rate, self.momentum)


@dataclass(frozen=True, kw_only=True)
class NAG(_WithMomentum):
    """Nesterov: ``d = lr * (g + wd * w); m = momentum * m + d; w -= momentum * m + d``.

    MXNet 1.9.1 takes the decay in ``m`` from the weight that it has just updated, against its documentation; this does
    not.

    Args:
        momentum: 0 <= momentum < 1; 0 is SGD and keeps no state.
    """

    name: ClassVar[str] = "nag"

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        gradient = make_gradient_transform(self, rates.decay)
        if not self.momentum:
            return sgd.SGDKernel(gradient, rates.rate)
        return sgd.NesterovKernel(gradient, rates.rate, self.momentum)


@dataclass(frozen=True, kw_only=True)
class Signum(_WithMomentum):
    """``m = momentum * m + (1 - momentum) * (g + wd * w); w -= lr * (sign(m) + wd_lh * w)``.

    With momentum 0 it is signSGD and keeps no state: ``w -= lr * (sign(g) + wd * w)``. ``wd_lh`` is decay that does not
    go through the sign (with momentum).
    """

    name: ClassVar[str] = "signum"
    momentum: float = field(default=0.9, metadata=_FRACTION)
    wd_lh: float = field(default=0.0, metadata=_NOT_NEGATIVE)

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        if self.momentum:
            return sgd.SignumKernel(make_gradient_transform(self, rates.decay), rates.rate, self.momentum, self.wd_lh)
        return sgd.SignumKernel(make_gradient_transform(self), rates.rate, 0.0, rates.decay)


@dataclass(frozen=True, kw_only=True)
class Test(Optimizer):
    """``w += rescale_grad * grad`` for tests of stores, since its sums are exact. MXNet's keeps a state."""

    __test__: ClassVar[bool] = False  # no test for pytest
    name: ClassVar[str] = "test"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Empty: it keeps no states."""
        return ()

    @property
    def is_lazy(self) -> bool:
        """True."""
        return True

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        return sgd.AccumulateKernel(self.rescale_grad)


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

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        scale = math.sqrt(1.0 - self.beta2**rates.t) / (1.0 - self.beta1**rates.t)
        moments = adam.AdamMoments(self.beta1, self.beta2, self.epsilon)
        return adam.AdamKernel(
            make_gradient_transform(self, rates.decay, clips_decay=True), moments, rates.rate * scale
        )


@dataclass(frozen=True, kw_only=True)
class AdamW(_WithMoments, _WithLazyUpdate):
    """Adam with decay of its own (Loshchilov, Hutter): ``w -= lr * (m' / (sqrt(v') + epsilon) + wd * w)``.

    ``m' = m / (1 - beta1**t)`` and ``v' = v / (1 - beta2**t)``: torch's formula. MXNet 1.9.1 has an operator for it,
    but no optimizer. The default of ``wd`` is 0, as everywhere here; torch's is 0.01.

    Args:
        beta1, beta2: decay rates of the averages ``m`` and ``v``.
        epsilon: keeps the quotient finite.
        lazy_update: a sparse gradient updates only its rows.
    """

    name: ClassVar[str] = "adamw"

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        moments = self._corrected_moments(rates.t)
        return adam.AdamKernel(make_gradient_transform(self), moments, rates.rate, rates.decay)


@dataclass(frozen=True, kw_only=True)
class AdaGrad(Optimizer):
    """AdaGrad (Duchi et al.): ``h += g * g; w -= lr * (g / sqrt(h + eps) + wd * w)``. Sparse gradients: always lazy."""

    name: ClassVar[str] = "adagrad"
    eps: float = field(default=1e-7, metadata=_NOT_NEGATIVE)

    @property
    def state_names(self) -> tuple[str, ...]:
        """``h``."""
        return ("history",)

    @property
    def is_lazy(self) -> bool:
        """True."""
        return True

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        return adam.AdaGradKernel(make_gradient_transform(self), rates.rate, self.eps, rates.decay)


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

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        gradient = make_gradient_transform(self, rates.decay, clips_decay=True)
        limit = self.clip_weights if self.clip_weights and self.clip_weights > 0.0 else None
        return adam.RMSPropKernel(gradient, rates.rate, self.gamma1, self.gamma2, self.epsilon, limit)


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
    lamda1: float = field(default=0.01, metadata=_NOT_NEGATIVE)
    beta: float = field(default=1.0, metadata=_NOT_NEGATIVE)

    @property
    def state_names(self) -> tuple[str, ...]:
        """``z`` and ``n``."""
        return ("z", "n")

    @property
    def is_lazy(self) -> bool:
        """True."""
        return True

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel:
        return adam.FtrlKernel(make_gradient_transform(self), rates.rate, self.lamda1, self.beta, rates.decay)


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

    def _kernel(self, rates: UpdateRates, key: Key | None) -> LayerwiseKernel:
        if self.bias_correction:
            moments = self._corrected_moments(rates.t)
        else:
            moments = adam.AdamMoments(self.beta1, self.beta2, self.epsilon)
        bounds = (bound if bound and bound > 0.0 else None for bound in (self.lower_bound, self.upper_bound))
        return adam.LambKernel(make_gradient_transform(self), moments, rates.rate, rates.decay, *bounds)


@dataclass(frozen=True, kw_only=True)
class LARS(_WithMomentum):
    """LARS (You et al., 2017): SGD at ``lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + eps)``. Layer-wise.

    At ``lr`` where a norm is 0, and for keys whose name ends with one of ``skip``. The norm is that of the gradient
    before it is clipped.

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

    def _kernel(self, rates: UpdateRates, key: Key | None) -> UpdateKernel | LayerwiseKernel:
        momentum = self.momentum
        if self.momentum_correction and rates.last_base:
            momentum *= rates.base / rates.last_base
        gradient = make_gradient_transform(self, rates.decay)
        name = "" if key is None else str(self.param_idx2name.get(key, key))
        if name.endswith(tuple(self.skip)):
            return sgd.SGDKernel(gradient, rates.rate, momentum)
        return sgd.LarsKernel(gradient, rates.rate, momentum, self.eta, self.eps)
