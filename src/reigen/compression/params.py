"""Codecs from dictionaries of names and values, as users write them and as they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reigen.compression.base import Codec
from reigen.compression.codecs import UNCHANGED, Cast, Int8, Signs, Ternary, TopK
from reigen.compression.error_feedback import ErrorFeedback
from reigen.errors import ArgumentError


@dataclass(frozen=True)
class _CodecType:
    """Type of compression: its factory and parameters, and whether it has error feedback by default."""

    make: Callable[..., Codec]
    accepted: tuple[str, ...] = ()
    feedback: bool = False


_VALUES: dict[str, Codec] = {"fp32": UNCHANGED, "fp16": Cast("fp16"), "bf16": Cast("bf16"), "int8": Int8()}


def _make_topk(values: object = "fp32", **options: Any) -> Codec:
    if not isinstance(values, str) or values not in _VALUES:
        raise ArgumentError(f'"values" of topk compression must be one of {", ".join(_VALUES)}, got {values!r}')
    return TopK(**options, values=_VALUES[values])


_TYPES: dict[str, _CodecType] = {
    "1bit": _CodecType(Signs, ("threshold", "scale"), feedback=True),
    "2bit": _CodecType(Ternary, ("threshold",), feedback=True),
    "bf16": _CodecType(lambda: Cast("bf16")),
    "fp16": _CodecType(lambda: Cast("fp16")),
    "fp32": _CodecType(lambda: Cast("fp32")),
    "int8": _CodecType(Int8),
    "topk": _CodecType(_make_topk, ("ratio", "k", "values"), feedback=True),
}


def means_none(params: object) -> bool:
    """Return whether ``params`` are those of no compression, ``{"type": "none"}``, whatever else is in them."""
    return isinstance(params, Mapping) and params.get("type") == "none"


def from_params(params: Mapping[str, Any]) -> Codec:
    """Make the codec that ``params`` describe.

    Args:
        params: ``type``: one of ``2bit``, ``1bit``, ``fp16``, ``bf16``, ``int8``, ``topk`` (``fp32`` changes nothing);
            ``threshold`` of 2bit and 1bit (0.5 where it is missing), and ``scale`` of 1bit (1); ``ratio`` or ``k``, and
            ``values`` (``fp32``, ``fp16``, ``bf16`` or ``int8``) of topk; ``ef``: whether with error feedback, which
            2bit, 1bit and topk have unless it is false. ``none`` is no codec: see `means_none`.

    Raises:
        ArgumentError: the type or a parameter is unknown, or a value makes no sense.

    Example:
        >>> codec = from_params({"type": "2bit", "threshold": 0.5})
        >>> codec.max_bytes(1_000_000)
        250000
    """
    if not isinstance(params, Mapping) or "type" not in params:
        raise ArgumentError(f'compression is described by a dict with a "type", got {params!r}')
    name = params["type"]
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ArgumentError(f"unknown type of compression {name!r}; there are {', '.join([*sorted(_TYPES), 'none'])}")
    unknown = [key for key in params if key not in {"type", "ef", *kind.accepted}]
    if unknown:
        accepted = ", ".join(["type", *kind.accepted, "ef"])
        raise ArgumentError(f"{name} compression has no parameter {unknown[0]!r}; it takes {accepted}")
    feedback = params.get("ef", kind.feedback)
    if not isinstance(feedback, bool):
        raise ArgumentError(f'"ef" of compression must be True or False, got {feedback!r}')
    codec = kind.make(**{key: params[key] for key in kind.accepted if key in params})
    return ErrorFeedback(codec) if feedback else codec


def chain(first: Codec, *codecs: Codec) -> Codec:
    """Chain codecs: the numbers sent by one are coded by the next: ``chain(ErrorFeedback(TopK(0.01)), Cast("fp16"))``.

    Error feedback stays around all of them, so that it makes up for the losses of the later codecs, too.

    Raises:
        ArgumentError: after a codec that sends no numbers; or error feedback further in.
    """
    codec = first.codec if isinstance(first, ErrorFeedback) else first
    for other in codecs:
        if isinstance(other, ErrorFeedback):
            raise ArgumentError("error feedback belongs around the first codec of a chain, or around all of it")
        if not isinstance(codec, TopK) or codec.values != UNCHANGED:
            raise ArgumentError(f"{codec.name} is the end of a chain: nothing can follow but after topk")
        codec = replace(codec, values=other)
    return ErrorFeedback(codec) if isinstance(first, ErrorFeedback) else codec
