"""Compression of gradients for all frameworks: the element type, or the codec, in which they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from reigen.compression import Cast as CastCodec
from reigen.compression import Codec, from_params, means_none
from reigen.errors import ArgumentError
from reigen.types import DTYPES, DType, ReduceOp

C = TypeVar("C")

_WIRE_DTYPES = {"fp16": DTYPES["float16"], "bf16": DTYPES["bfloat16"]}


@dataclass(frozen=True)
class CastCompression:
    """Floating-point tensors travel, and are reduced, as ``wire``; None sends them as they are."""

    wire: DType | None = None

    def wire_dtype(self, dtype: DType) -> DType:
        """The element type in which a tensor of ``dtype`` travels; integers and bool are never cast."""
        return self.wire if self.wire is not None and dtype.is_floating else dtype


@dataclass(frozen=True)
class CodecCompression:
    """Gradients travel as ``codec``'s codes, which every rank gets from all ranks and adds up itself."""

    codec: Codec

    def wire_dtype(self, dtype: DType) -> DType:
        """The element type that is coded: the tensor's own."""
        return dtype


def parse_compression(compression: object, names: str) -> CastCompression | CodecCompression:
    """Parse a user's argument: a `CastCompression`, a codec, or what `reigen.compression.from_params` makes a codec of.

    fp16 and bf16 without error feedback are casts: reduced in that type on the way, instead of being gathered. So is
    the type ``none``.

    Raises:
        ArgumentError: nothing of the kind; the message has ``names``, the framework's own casts.
    """
    if isinstance(compression, CastCompression):
        return compression
    if means_none(compression):
        return CastCompression()
    codec = from_params(compression) if isinstance(compression, Mapping) else compression
    if isinstance(codec, CastCodec):
        return CastCompression(_WIRE_DTYPES.get(codec.to))
    if not isinstance(codec, Codec):
        raise ArgumentError(
            f'compression must be {names}, a dict such as {{"type": "2bit"}} or a codec of reigen.compression, '
            f"got {compression!r}"
        )
    return CodecCompression(codec)


def as_compressor(compression: C, names: str) -> C:
    """``compression`` itself, if it makes tensors of tensors; a class of the user's own may, too, as in Horovod.

    Raises:
        ArgumentError: it does not; the message has ``names``, the framework's own compressors.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ArgumentError(
            f"compression must be {names} here, or have compress() and decompress(), got {compression!r}; codes of "
            "fewer bits are for optimizers (DistributedOptimizer, DistributedTrainer) and for parameter servers"
        )
    return compression


def check_op_allowed(op: ReduceOp, compression: CastCompression | CodecCompression) -> None:
    """Raise ArgumentError if the operator cannot be done with what travels: codes can be added up, and nothing else."""
    if isinstance(compression, CodecCompression) and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ArgumentError(
            f"{compression.codec.name} compression needs op=Average or op=Sum, got {op.name.title()}: "
            "codes can be added up, and nothing else"
        )


def describe(compression: CastCompression | CodecCompression) -> str:
    """For the comparison between ranks: the same for codecs that understand each other, and for no others."""
    if isinstance(compression, CastCompression):
        return "not coded"
    params: dict[str, Any] = compression.codec.params()
    return "coded as " + ", ".join(f"{name} {value}" for name, value in sorted(params.items()))
