"""Reigen's sums in `reigen bench frameworks`: NumPy's face, TensorFlow's and JAX's, eager and in a compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import reigen
from benchmarks.harness.work import Case, WrongResultError
from reigen import __version__
from reigen.errors import ArgumentError

#: Kernels and biases of 30 layers: 25 million elements.
GRADIENT_SHAPES = ((912, 912), (912,)) * 30
_SUM = reigen.Sum
#: Sums in one call of a chain.
CHAIN_LENGTH = 16


class Sums:
    """One rank of a Reigen job."""

    def __init__(self) -> None:
        reigen.init()
        self._numbers = itertools.count()
        self.versions = {"reigen": __version__, "numpy": np.__version__}

    def open(self, case: Case) -> Sum:
        """``FACE/WAY`` of one tensor of so many bytes, or without a size of all gradients in one group.

        The faces are numpy, tensorflow and jax; the ways are eager, graph or jit, chain: averages one of the other in
        a graph, and empty: a graph or jit that doubles a tensor, without Reigen.
        """
        face, _, way = case.name.partition("/")
        make = _FACES.get(face)
        if make is None:
            raise ArgumentError(f"there is no face {face!r}; there are {', '.join(_FACES)}")
        shapes = [(case.nbytes // 4,)] if case.nbytes else list(GRADIENT_SHAPES)
        size = reigen.size()
        expected = {"empty": 2.0 * (reigen.rank() + 1), "chain": (size + 1) / 2}.get(way, size * (size + 1) / 2)
        reduce, fill = make(f"bench.{next(self._numbers)}", way, is_grouped=not case.nbytes)
        return Sum(shapes, reduce, fill, expected, writes_anew=not case.nbytes)

    def close(self) -> None:
        """Leave the job."""
        reigen.shutdown()


class Sum:
    """A `Work`: rank r has arrays full of r + 1, an operation sums them over the ranks.

    Args:
        shapes: of the arrays, float32.
        reduce: returns the sums of arrays, complete.
        fill: makes an array of a shape, full of a value.
        expected: every element of the results.
        writes_anew: each operation has new arrays, as gradients are; else all have the same, as a loop of calls has:
            a short call is then measured without the time by which one rank makes its arrays later than another.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        reduce: Callable[[list[Any]], Sequence[Any]],
        fill: Callable[[tuple[int, ...], float], Any],
        expected: float,
        *,
        writes_anew: bool,
    ) -> None:
        self._shapes, self._reduce, self._fill, self._expected = shapes, reduce, fill, expected
        self._writes_anew = writes_anew
        self._arrays: list[Any] = []
        self._sums: Sequence[Any] = ()

    def prepare(self) -> None:
        """Write this rank's arrays if there are none, or if they are to be new; the last ones are given back first."""
        if self._arrays and not self._writes_anew:
            return
        self._arrays, self._sums = [], ()
        self._arrays = [self._fill(shape, reigen.rank() + 1) for shape in self._shapes]

    def operate(self) -> None:
        """Sum them."""
        self._sums = self._reduce(self._arrays)

    def check(self) -> None:
        """Every element is the closed form's.

        Raises:
            WrongResultError: one is not.
        """
        if len(self._sums) != len(self._shapes):
            raise WrongResultError(f"{len(self._sums)} sums of {len(self._shapes)} arrays")
        for shape, found in zip(self._shapes, map(np.asarray, self._sums), strict=True):
            if found.shape != shape or not (found == self._expected).all():
                raise WrongResultError(f"an array of shape {shape}: the sum is {self._expected:g}, not {found}")

    def close(self) -> None:
        """Forget the arrays."""
        self._arrays, self._sums = [], ()


_Face = tuple[Callable[[list[Any]], Sequence[Any]], Callable[[tuple[int, ...], float], Any]]


def _numpy(name: str, way: str, *, is_grouped: bool) -> _Face:
    def fill(shape: tuple[int, ...], value: float) -> Any:
        return np.full(shape, value, np.float32)

    return _reducer(reigen, name, is_grouped=is_grouped), fill


def _tensorflow(name: str, way: str, *, is_grouped: bool) -> _Face:
    import tensorflow as tf

    import reigen.tensorflow as hvd

    def fill(shape: tuple[int, ...], value: float) -> Any:
        return tf.fill(shape, tf.constant(value, tf.float32))

    def chain(arrays: list[Any]) -> list[Any]:
        total = arrays[0]
        for number in range(CHAIN_LENGTH):
            total = hvd.allreduce(total, name=f"{name}.{number}", op=hvd.Average)
        return [total]

    reduce = {"empty": _double, "chain": chain}.get(way) or _reducer(hvd, name, is_grouped=is_grouped)
    return (reduce if way == "eager" else tf.function(reduce, autograph=False)), fill


def _jax(name: str, way: str, *, is_grouped: bool) -> _Face:
    """In a jit the program may write into a group's arrays, as it may into gradients that it has computed itself."""
    import jax
    import jax.numpy as jnp

    import reigen.jax as hvd

    def fill(shape: tuple[int, ...], value: float) -> Any:
        return jax.block_until_ready(jnp.full(shape, value, jnp.float32))

    reduce = _double if way == "empty" else _reducer(hvd, name, is_grouped=is_grouped)
    run = reduce if way == "eager" else jax.jit(reduce, donate_argnums=0 if is_grouped else ())
    return (lambda arrays: jax.block_until_ready(run(arrays))), fill


def _double(arrays: list[Any]) -> list[Any]:
    return [array * 2.0 for array in arrays]


def _reducer(hvd: Any, name: str, *, is_grouped: bool) -> Callable[[list[Any]], Any]:
    if is_grouped:
        return lambda arrays: hvd.grouped_allreduce(arrays, name=name, op=_SUM)
    return lambda arrays: [hvd.allreduce(arrays[0], name=name, op=_SUM)]


_FACES: dict[str, Callable[..., _Face]] = {"numpy": _numpy, "tensorflow": _tensorflow, "jax": _jax}


def start(rank: int, size: int) -> Sums:
    """The program of one rank."""
    return Sums()
