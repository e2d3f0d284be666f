"""Every knob: its name, its default, where it may come from, and where it did come from.

Precedence: REIGEN_*, HOROVOD_*, default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from reigen.errors import ConfigError

_MIB = 1 << 20


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError("must be a number of seconds greater than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


@dataclass(frozen=True)
class _Knob:
    variables: tuple[str, ...]
    parse: Callable[[str], object]


@dataclass(frozen=True)
class Config:
    """The knobs of one job.

    Attributes:
        deadline_seconds: how long a collective may wait for its last rank, and for the ranks to do their part.
        start_timeout_seconds: how long init() waits for the other ranks.
        fusion_threshold_bytes: allreduces of up to so many bytes in all travel together; 0 turns fusion off.
        cache_capacity: operations whose negotiation is remembered; 0 turns the response cache off.
        bucket_bytes: size of a gradient bucket.
        plane: data plane to use, or None to choose.
        origins: for each knob that was set, the variable that set it.
    """

    deadline_seconds: float = 600.0
    start_timeout_seconds: float = 30.0
    fusion_threshold_bytes: int = 128 * _MIB
    cache_capacity: int = 1024
    bucket_bytes: int = 16 * _MIB
    plane: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


_KNOBS: dict[str, _Knob] = {
    "deadline_seconds": _Knob(("REIGEN_DEADLINE",), _seconds),
    "start_timeout_seconds": _Knob(("REIGEN_START_TIMEOUT", "HOROVOD_START_TIMEOUT"), _seconds),
    "fusion_threshold_bytes": _Knob(("REIGEN_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"), _count),
    "cache_capacity": _Knob(("REIGEN_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY"), _count),
    "bucket_bytes": _Knob(("REIGEN_BUCKET_BYTES",), _positive),
    "plane": _Knob(("REIGEN_PLANE",), str),
}
if set(_KNOBS) != {f.name for f in fields(Config)} - {"origins"}:
    raise AssertionError("a knob without a variable")


def load(environ: Mapping[str, str]) -> Config:
    """The configuration that ``environ`` asks for. Empty variables count as unset.

    Raises:
        ConfigError: a variable's value makes no sense; names the variable.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, knob in _KNOBS.items():
        variable = next((v for v in knob.variables if environ.get(v)), None)
        if variable is None:
            continue
        try:
            values[name] = knob.parse(environ[variable])
        except ValueError as error:
            raise ConfigError(f"{variable}={environ[variable]}: {error}") from None
        origins[name] = variable
    return Config(**values, origins=origins)  # type: ignore[arg-type]  # each parse function gives its field's type
