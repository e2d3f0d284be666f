"""Training profile: the computing of one rank in a step, and the gradients that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reigen.errors import ArgumentError
from reigen.planner.json_files import JsonFormat
from reigen.planner.units import parse_count, parse_number, parse_time
from reigen.types import DTYPES

_FORMAT = JsonFormat("training profile", 1, "tensors", list, "`reigen trace FILE --profile` makes one")
#: Of one tensor: ten times as many as the largest models have in all.
_MAX_ELEMENTS = 1 << 36


@dataclass(frozen=True, slots=True)
class GradientProfile:
    """Parameter and its gradient.

    Attributes:
        name, elements, dtype: as the framework has it; the gradient is of the same type.
        ready_seconds: when the gradient is there, after the start of backward.
    """

    name: str
    elements: int
    dtype: str
    ready_seconds: float

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.elements * self.itemsize


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """Step of one rank. `reigen.planner` describes the file and the meaning of each field."""

    name: str
    batch: int
    tensors: tuple[GradientProfile, ...]
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    other_seconds: float = 0.0
    processors: float = 1.0
    samples_per_epoch: int = 0
    steps: int | None = None
    source: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def step_seconds(self) -> float:
        """Length of a step of one rank alone."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds + self.other_seconds

    def to_json(self) -> dict[str, Any]:
        """Return the content of a file that `make_profile` reads."""
        names = "name source batch samples_per_epoch forward_seconds backward_seconds update_seconds other_seconds"
        tensors = [
            {"name": t.name, "elements": t.elements, "dtype": t.dtype, "ready_seconds": t.ready_seconds}
            for t in self.tensors
        ]
        return {
            "version": _FORMAT.version,
            **{name: getattr(self, name) for name in f"{names} processors steps".split()},
            "tensors": tensors,
        }


def read_profile(path: str | Path) -> TrainingProfile:
    """Read ``train.json``.

    Raises:
        ArgumentError: it is no profile, is of another version, or something in it is wrong.
        OSError: it cannot be read.
    """
    return make_profile(_FORMAT.read(path), str(path))


def make_profile(content: Any, path: str) -> TrainingProfile:
    """Return the profile of a file's content; ``path`` names it in errors.

    Raises:
        ArgumentError: something in it is missing or wrong.
    """
    content = _FORMAT.check(content, path)
    if not content["tensors"]:
        raise ArgumentError(f"{path}: 'tensors' is empty: a job without gradients has nothing to reduce")
    steps = content.get("steps")
    if steps is not None and not parse_count(steps, f"{path}: steps"):
        raise ArgumentError(
            f"{path} is a profile without steps (steps: 0): nothing was measured; let the job that is profiled take "
            "some steps"
        )
    times = {
        name: parse_time(_get(content, name, path), f"{path}: {name}")
        for name in ("forward_seconds", "backward_seconds", "update_seconds")
    }
    batch = parse_count(_get(content, "batch", path), f"{path}: batch")
    if not batch or not sum(times.values()):
        raise ArgumentError(f"{path}: batch, and the time of a step, must be above 0")
    return TrainingProfile(
        name=str(content.get("name", Path(path).stem)),
        batch=batch,
        tensors=_read_tensors(content["tensors"], times["backward_seconds"], path),
        **times,
        other_seconds=parse_time(content.get("other_seconds", 0.0), f"{path}: other_seconds"),
        processors=parse_number(content.get("processors", 1.0), f"{path}: processors"),
        samples_per_epoch=parse_count(content.get("samples_per_epoch", 0), f"{path}: samples_per_epoch"),
        steps=None if steps is None else int(steps),
        source=str(content.get("source", "")),
    )


def _get(content: Mapping[str, Any], name: str, path: str) -> Any:
    if content.get(name) is None:
        raise ArgumentError(f"{path}: {name} is missing")
    return content[name]


def _read_tensors(entries: list[Any], backward_seconds: float, path: str) -> tuple[GradientProfile, ...]:
    facts: list[tuple[str, int, str, float | None]] = []
    for index, entry in enumerate(entries):
        where = f"{path}: tensors[{index}]"
        if not isinstance(entry, dict):
            raise ArgumentError(f"{where} is no table")
        dtype, ready = str(entry.get("dtype", "float32")), entry.get("ready_seconds")
        if dtype not in DTYPES:
            raise ArgumentError(f"{where}: there is no element type {dtype!r}; there are {', '.join(sorted(DTYPES))}")
        elements = parse_count(_get(entry, "elements", where), f"{where}: elements")
        if elements > _MAX_ELEMENTS:
            raise ArgumentError(f"{where}: {elements} elements are more than a tensor can have here ({_MAX_ELEMENTS})")
        when = None if ready is None else parse_time(ready, f"{where}: ready_seconds")
        if when is not None and when > backward_seconds * 1.001:
            raise ArgumentError(
                f"{where}: its gradient is ready {when:g} s after backward began, but that ends after "
                f"{backward_seconds:g} s"
            )
        facts.append((str(entry.get("name", index)), elements, dtype, when))
    total = sum(elements for _, elements, _, _ in facts) or 1
    left, tensors = total, []
    for name, elements, dtype, when in facts:
        # backward runs from the last to the first: when it comes here, everything behind is done, and this one too
        guess = backward_seconds * left / total
        tensors.append(GradientProfile(name, elements, dtype, guess if when is None else when))
        left -= elements
    return tuple(tensors)
