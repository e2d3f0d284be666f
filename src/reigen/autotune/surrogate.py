"""Gaussian process over the points of a search space, and the point whose expected improvement is greatest.

Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006; Jones, Schonlau and Welch, "Efficient global
optimization of expensive black-box functions", 1998. The regression is scikit-learn's, which is loaded with the first
`GaussianSurrogate`.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from reigen.autotune.search_space import ParameterPoint
from reigen.errors import ConfigError

#: Standard deviation of what is observed, at least: a median of a few samples is no better.
_LEAST_NOISE = 0.005


@dataclass(frozen=True, slots=True)
class PointObservation:
    """Observation at a point, relative to the base.

    Attributes:
        point: the parameters.
        coordinates: its place in the search space.
        value: logarithm of how many times faster it is than the base.
        noise: standard deviation of the value.
    """

    point: ParameterPoint
    coordinates: tuple[float, ...]
    value: float
    noise: float


class Surrogate(Protocol):
    """Model of the search space that proposes points."""

    def propose(
        self, observations: Sequence[PointObservation], candidates: Sequence[Sequence[float]]
    ) -> tuple[int, float] | None:
        """Return the candidate with the greatest expected improvement of the value, and that; None: there is none."""

    def means(self, observations: Sequence[PointObservation]) -> list[float]:
        """Return the mean of the model at the points that were observed."""


class GaussianSurrogate:
    """`Surrogate` by Gaussian process regression.

    Args:
        noise: standard deviation of the observations in units of their spread, as Horovod's option; None: as observed.
        loads_now: load the library, which takes a second or two; else when a point is proposed.

    Raises:
        ConfigError: there is no scikit-learn.
    """

    def __init__(self, noise: float | None = None, *, loads_now: bool = True) -> None:
        self._noise = noise
        self._library: Any = load_library() if loads_now else None
        if not loads_now and importlib.util.find_spec("sklearn") is None:
            raise _missing_library("No module named 'sklearn'")

    def propose(
        self, observations: Sequence[PointObservation], candidates: Sequence[Sequence[float]]
    ) -> tuple[int, float] | None:
        """Implement `Surrogate.propose`."""
        if not candidates:
            return None
        model, spread = self._fit(observations)
        means, deviations = model.predict(np.array(candidates), return_std=True)
        best = float(model.predict(np.array([one.coordinates for one in observations])).max())
        improvements = expected_improvement(means, deviations, best) * spread
        place = int(improvements.argmax())
        return place, float(improvements[place])

    def means(self, observations: Sequence[PointObservation]) -> list[float]:
        """Implement `Surrogate.means`, but for a number that is added to all of them."""
        model, spread = self._fit(observations)
        means = model.predict(np.array([one.coordinates for one in observations])) * spread
        return [float(mean) for mean in means]

    def _fit(self, observations: Sequence[PointObservation]) -> tuple[Any, float]:
        """Return the model of the values, less their mean and in units of their spread, and the spread."""
        if self._library is None:
            self._library = load_library()
        places = np.array([one.coordinates for one in observations], float)
        values = np.array([one.value for one in observations])
        spread = max(float(values.std()), _LEAST_NOISE)
        noises = np.array([max(one.noise, _LEAST_NOISE) for one in observations]) / spread
        if self._noise is not None:
            noises = np.full(len(observations), max(self._noise, 1e-3))
        kernels = self._library.kernels
        kernel = kernels.ConstantKernel(1.0, (0.1, 10.0)) * kernels.Matern(
            np.full(places.shape[1], 0.7), (0.2, 5.0), nu=2.5
        )
        model = self._library.GaussianProcessRegressor(kernel, alpha=noises**2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length at its bound: few points say little about it
            return model.fit(places, (values - values.mean()) / spread), spread


def load_library() -> Any:
    """Return scikit-learn's module of Gaussian processes.

    Raises:
        ConfigError: there is none.
    """
    try:
        from sklearn import gaussian_process
    except ImportError as error:
        raise _missing_library(str(error)) from error
    return gaussian_process


def _missing_library(reason: str) -> ConfigError:
    return ConfigError(f"autotuning needs scikit-learn on rank 0: pip install 'reigen[autotune]' ({reason})")


def expected_improvement(means: Any, deviations: Any, best: float) -> Any:
    """Return the expected improvement over ``best`` at points whose values are normally distributed."""
    gain, deviations = means - best, np.maximum(deviations, 1e-12)
    scaled = gain / deviations
    density = np.exp(-0.5 * scaled**2) / np.sqrt(2 * np.pi)
    below = np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in scaled])
    return gain * below + deviations * density
