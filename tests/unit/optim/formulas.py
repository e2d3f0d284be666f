"""The update rules written down in float64, one line after the other, as in the papers and MXNet's documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.optim import Optimizer

Vector = NDArray[np.float64]
Formula = Callable[[Any, Vector, Vector, dict[str, Any], int], Vector]


def _clip(values: Vector, bound: float | None) -> Vector:
    return values if bound is None else np.clip(values, -bound, bound)


def _average(states: dict[str, Any], name: str, value: Vector, keep: float) -> Vector:
    states[name] = keep * states.get(name, 0.0) + (1 - keep) * value
    return states[name]  # type: ignore[no-any-return]


def sgd(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad, o.clip_gradient) + o.wd * w
    s["m"] = o.momentum * s.get("m", 0.0) + o.rate_of(t) * g
    return w - s["m"]


def nag(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad, o.clip_gradient) + o.wd * w
    s["m"] = o.momentum * s.get("m", 0.0) + g
    return w - o.rate_of(t) * (g + o.momentum * s["m"])


def signum(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g, lr = _clip(g * o.rescale_grad, o.clip_gradient), o.rate_of(t)
    if not o.momentum:
        return (1 - lr * o.wd) * w - lr * np.sign(g)
    return (1 - lr * o.wd_lh) * w - lr * np.sign(_average(s, "m", g + o.wd * w, o.momentum))


def adam(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad + o.wd * w, o.clip_gradient)
    m, v = _average(s, "m", g, o.beta1), _average(s, "v", g**2, o.beta2)
    return w - o.rate_of(t) * math.sqrt(1 - o.beta2**t) / (1 - o.beta1**t) * m / (np.sqrt(v) + o.epsilon)


def _lamb_direction(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad, o.clip_gradient)
    m, v = _average(s, "m", g, o.beta1), _average(s, "v", g**2, o.beta2)
    if getattr(o, "bias_correction", True):
        m, v = m / (1 - o.beta1**t), v / (1 - o.beta2**t)
    return m / (np.sqrt(v) + o.epsilon) + o.wd * w


def adamw(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    return w - o.rate_of(t) * _lamb_direction(o, w, g, s, t)


def lamb(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    u = _lamb_direction(o, w, g, s, t)
    r1, r2 = np.linalg.norm(w), np.linalg.norm(u)
    r1 = max(r1, o.lower_bound or 0.0)
    r1 = min(r1, o.upper_bound or math.inf)
    return w - o.rate_of(t) * (r1 / r2 if r1 and r2 else 1.0) * u


def lars(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    norm, rescaled = np.linalg.norm(w), g * o.rescale_grad
    lr = o.rate_of(t) * (o.eta * norm / (np.linalg.norm(rescaled) + o.wd * norm + o.eps))
    correction = o.rate_of(t) / o.rate_of(t - 1) if o.momentum_correction and t > 1 else 1.0
    s["m"] = o.momentum * correction * s.get("m", 0.0) + lr * (_clip(rescaled, o.clip_gradient) + o.wd * w)
    return w - s["m"]


def adagrad(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad, o.clip_gradient)
    s["h"] = s.get("h", 0.0) + g**2
    return w - o.rate_of(t) * (g / np.sqrt(s["h"] + o.eps) + o.wd * w)


def rmsprop(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g = _clip(g * o.rescale_grad + o.wd * w, o.clip_gradient)
    n = _average(s, "n", g**2, o.gamma1)
    if o.centered:
        n = n - _average(s, "m", g, o.gamma1) ** 2
    step = o.rate_of(t) * g / np.sqrt(n + o.epsilon)
    if o.centered:
        s["d"] = step = o.gamma2 * s.get("d", 0.0) + step
    return _clip(w - step, o.clip_weights)


def ftrl(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    g, lr, n = _clip(g * o.rescale_grad, o.clip_gradient), o.rate_of(t), s.get("n", np.zeros_like(w))
    z = s["z"] = s.get("z", 0.0) + g - (np.sqrt(n + g**2) - np.sqrt(n)) * w / lr
    n = s["n"] = n + g**2
    return np.where(np.abs(z) > o.lamda1, (np.sign(z) * o.lamda1 - z) / ((o.beta + np.sqrt(n)) / lr + o.wd), 0.0)


def test(o: Any, w: Vector, g: Vector, s: dict[str, Any], t: int) -> Vector:
    return w + o.rescale_grad * g


FORMULAS: dict[str, Formula] = {
    rule.__name__: rule  # type: ignore[attr-defined]
    for rule in (adagrad, adam, adamw, ftrl, lamb, lars, nag, rmsprop, sgd, signum, test)
}


def trained(optimizer: Optimizer, weight: Vector, gradients: list[Vector]) -> Vector:
    """``weight`` after one update with each of ``gradients``."""
    states: dict[str, Any] = {}
    for t, gradient in enumerate(gradients, start=1):
        weight = FORMULAS[optimizer.name](optimizer, weight, gradient.astype(np.float64), states, t)
    return weight
